"""Text and tables as apps have them: bags of words, character models, recommenders, LoRA, and nets for physics."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .entry import CLASSES, VOCABULARY, Batch, Entry, both, classes, features, language_loss, nothing, token_labels, tokens, values
from .pretrained import FromTokens, build

_LENGTHS = (8, 11)
_ROWS = tokens("x")


class TextCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12, padding_idx=0)
        self.convs, self.head = nn.ModuleList(nn.Conv1d(12, 6, width) for width in (2, 3, 4)), nn.Linear(18, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.embedding(x).transpose(1, 2)
        pooled = [F.relu(conv(seen)) for conv in self.convs]
        return self.head(torch.cat([F.max_pool1d(one, one.shape[2]).squeeze(2) for one in pooled], 1))


class FastText(nn.Module):
    """A bag of words."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(VOCABULARY, 12, mode=mode, padding_idx=0), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.bag(x))


class Characters(nn.Module):
    """A character model with tied weights, two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.out = nn.Embedding(VOCABULARY, 12), nn.LSTM(12, 12, 2, batch_first=True), nn.Linear(12, VOCABULARY)
        self.out.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.embedding(x))[0])


class Translator(nn.Module):
    """`nn.Transformer`, source and target, with PyTorch's own masks."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, 16), nn.Embedding(VOCABULARY, 16)
        self.body = nn.Transformer(16, 2, 1, 1, 24, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        length = target.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        return self.out(self.body(self.source(source), self.target(target), tgt_mask=mask))


class Bahdanau(nn.Module):
    """A GRU reads, additive attention looks back while a GRUCell writes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.read, self.write = nn.Embedding(VOCABULARY, 8), nn.GRU(8, 10, batch_first=True), nn.GRUCell(18, 10)
        self.query, self.key, self.score, self.out = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 1), nn.Linear(10, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen, last = self.read(self.embedding(source))
        state, outputs = last[-1], []
        for step in range(target.shape[1]):
            weights = self.score(torch.tanh(self.query(state)[:, None] + self.key(seen))).softmax(1)
            state = self.write(torch.cat([self.embedding(target[:, step]), (weights * seen).sum(1)], -1), state)
            outputs.append(self.out(state))
        return torch.stack(outputs, 1)


class LowRank(nn.Module):
    """LoRA: a frozen linear layer and a trainable update of rank 2."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * (x @ self.down.T) @ self.up.T


def _adapted(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    model.requires_grad_(False)
    for part in list(model.modules()):
        for child, layer in list(part.named_children()):
            if child in names and isinstance(layer, nn.Linear):
                setattr(part, child, LowRank(layer))
    return model


def lora_llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0}
    model = build("LlamaForCausalLM", "LlamaConfig", use_cache=False, bos_token_id=1, eos_token_id=2, **sizes)
    return FromTokens(_adapted(model, ("q_proj", "v_proj")))


def lora_distilbert() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64}
    model: Any = _adapted(build("DistilBertForSequenceClassification", "DistilBertConfig", num_labels=CLASSES, **sizes), ("q_lin", "v_lin"))
    model.classifier.requires_grad_(True)
    return FromTokens(model)


class WideAndDeep(nn.Module):
    """A table with categories and numbers: embeddings, BatchNorm, a wide part."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(VOCABULARY, 4) for _ in range(3))
        self.norm, self.deep, self.wide = nn.BatchNorm1d(5), nn.Sequential(nn.Linear(17, 16), nn.ReLU(), nn.Linear(16, 1)), nn.Linear(5, 1)

    def forward(self, kinds: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        seen = [embedding(kinds[:, place]) for place, embedding in enumerate(self.embeddings)]
        return (self.deep(torch.cat([*seen, self.norm(numbers)], 1)) + self.wide(numbers)).squeeze(1)


class Recommender(nn.Module):
    """DLRM: embeddings of users and items, pairwise products of all features by a lower triangle."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.bottom, self.top = (
            nn.Embedding(VOCABULARY, 8),
            nn.Embedding(VOCABULARY, 8),
            nn.Linear(5, 8),
            nn.Linear(11, 1),
        )

    def forward(self, kinds: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        dense = F.relu(self.bottom(numbers))
        features = torch.stack([dense, self.users(kinds[:, 0]), self.items(kinds[:, 1])], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.tril_indices(3, 3, offset=-1)
        return self.top(torch.cat([dense, products[:, rows, columns]], 1)).squeeze(1)


class Experts(nn.Module):
    """Multi-gate mixture of experts with two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.gates, self.towers = (
            nn.Linear(6, 24),
            nn.ModuleList(nn.Linear(6, 3) for _ in range(2)),
            nn.ModuleList(nn.Linear(8, 1) for _ in range(2)),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen = F.selu(self.experts(x)).view(-1, 3, 8)
        mixed = [torch.einsum("be,bec->bc", gate(x).softmax(-1), seen) for gate in self.gates]
        return tuple(tower(one).squeeze(1) for tower, one in zip(self.towers, mixed, strict=True))


def two_tasks(outputs: tuple[torch.Tensor, torch.Tensor], clicked: torch.Tensor, watched: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(outputs[0], clicked) + F.huber_loss(outputs[1], watched, delta=0.5)


class Siren(nn.Module):
    """A field of sines, as for NeRF, with positional encoding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(15, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        encoded = torch.cat([x, *(function(2**level * x) for level in range(2) for function in (torch.sin, torch.cos))], -1)
        colour, density = self.out(torch.sin(30 * self.second(torch.sin(self.first(encoded))))).split([3, 1], -1)
        transparency = torch.exp(-torch.cumsum(F.relu(density), 1))
        return (transparency * colour.sigmoid()).sum(1)


class Ode(nn.Module):
    """A neural ODE with four Runge-Kutta steps."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.head = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            first = self.slope(x)
            second = self.slope(x + 0.125 * first)
            third = self.slope(x + 0.125 * second)
            x = x + (first + 2 * second + 2 * third + self.slope(x + 0.25 * third)) / 24
        return self.head(x)


class Splines(nn.Module):
    """A Kolmogorov-Arnold layer: B-splines on a grid, by the recursive formula."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2.0, 2.0, 9))
        self.weights, self.base = nn.Parameter(torch.randn(CLASSES, 6, 5) * 0.3), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid: Any = self.grid
        bases = ((x[..., None] >= grid[:-1]) & (x[..., None] < grid[1:])).to(x.dtype)
        for order in range(1, 4):
            left = (x[..., None] - grid[: -order - 1]) / (grid[order:-1] - grid[: -order - 1]) * bases[..., :-1]
            right = (grid[order + 1 :] - x[..., None]) / (grid[order + 1 :] - grid[1:-order]) * bases[..., 1:]
            bases = left + right
        return torch.einsum("bis,ois->bo", bases, self.weights) + self.base(F.silu(x))


def weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Rare classes count more."""
    return F.cross_entropy(logits, labels, weight=torch.tensor([1.0, 2, 3, 0.5, 1], dtype=logits.dtype), label_smoothing=0.1)


class Policy(nn.Module):
    """An actor and a critic with PPO's clipped loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh()), nn.Linear(16, CLASSES), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, action: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        seen = self.body(x)
        likely = self.actor(seen).log_softmax(-1)
        ratio = (likely.gather(1, action[:, None]).squeeze(1) - old).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        entropy = -(likely.exp() * likely).sum(-1).mean()
        return 0.5 * (self.critic(seen).squeeze(1) - advantage).square().mean() - gain - 0.01 * entropy


def _table(size: int, length: int) -> Batch:
    return {"kinds": torch.randint(0, VOCABULARY, (size, 3)), "numbers": torch.randn(size, 5)}


def _clicks(name: str = "target") -> Any:
    return lambda size, length: {name: (torch.rand(size) > 0.5).float()}


def _play(size: int, length: int) -> Batch:
    return {
        "x": torch.randn(size, 6),
        "action": torch.randint(0, CLASSES, (size,)),
        "old": -torch.rand(size) * 3,
        "advantage": torch.randn(size),
    }


_TWO = both(tokens("source"), tokens("target"))

ENTRIES = [
    Entry("text_cnn", "text", TextCNN, _ROWS, classes(), lengths=_LENGTHS, sequence={"x": (1,)}),
    *(
        Entry(f"fasttext_{mode}", "text", partial(FastText, mode), _ROWS, classes(), lengths=_LENGTHS, sequence={"x": (1,)})
        for mode in ("mean", "sum", "max")
    ),
    Entry("character_lstm_tied", "text", Characters, _ROWS, token_labels(), loss=language_loss, lengths=(8, 8)),
    Entry(
        "transformer_from_torch_nn",
        "text",
        Translator,
        _TWO,
        token_labels(),
        loss=language_loss,
        lengths=_LENGTHS,
        sequence={"source": (1,), "target": (1,), "labels": (1,)},
    ),
    Entry("bahdanau_attention", "text", Bahdanau, _TWO, token_labels(), loss=language_loss, lengths=(5, 5)),
    Entry(
        "lora_llama",
        "text",
        lora_llama,
        tokens(),
        token_labels(),
        loss=language_loss,
        lengths=_LENGTHS,
        sequence={"input_ids": (1,), "labels": (1,)},
    ),
    Entry("lora_distilbert", "text", lora_distilbert, tokens(), classes(), lengths=_LENGTHS, sequence={"input_ids": (1,)}),
    Entry("wide_and_deep", "tables", WideAndDeep, _table, _clicks(), loss="bce_with_logits"),
    Entry("dlrm", "tables", Recommender, _table, _clicks(), loss=nn.BCEWithLogitsLoss()),
    Entry("multi_gate_experts", "tables", Experts, features(6), both(_clicks("clicked"), values(name="watched")), loss=two_tasks),
    Entry("siren_field", "tables", Siren, features(6, 3), values(3), loss="mse"),
    Entry("neural_ode", "tables", Ode, features(6), classes()),
    Entry("kolmogorov_arnold", "tables", Splines, features(6), classes(), loss=weighted),
    Entry("actor_critic_ppo", "tables", Policy, _play, nothing, loss=None),
]
