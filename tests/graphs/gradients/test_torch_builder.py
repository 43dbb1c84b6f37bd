"""`export_artifacts` with PyTorch's own gradients: modules whose graph is more than a chain of layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.graphs.parity import assert_trains_like

pytestmark = pytest.mark.ort


class SharedNorms(nn.Module):
    """BatchNorm used twice, one with an average over all batches, one that stays in eval mode, and an InstanceNorm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3, padding=1, bias=False)
        self.twice, self.average, self.still = nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(4)
        self.instance = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.fc = nn.Linear(4, 3)
        for norm in (self.twice, self.average, self.still, self.instance):
            nn.init.uniform_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
        self.still.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(self.conv(x))) * 2)
        return self.fc(self.instance(torch.tanh(self.still(torch.tanh(self.average(x) + 0.1)))).square().mean(-1))


class Centred(nn.Module):
    """Buffers that change: one is read before and in the backward, one is replaced by something else."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 3)
        self.register_buffer("centre", torch.full((3,), 0.5))
        self.register_buffer("last", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.fc(x)
        shifted = scores * self.centre.clone() - self.last
        with torch.no_grad():
            self.centre.mul_(0.9).add_(scores.mean(0), alpha=0.1)
            self.last.copy_(scores.amax(0))
        return shifted


class StraightThrough(nn.Module):
    """Gradients that stop: `detach`, `no_grad`, a padding row, a weight used twice, a weight that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight
        self.gate, self.unused = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x).mean(1)
        rounded = hidden + (torch.round(hidden * 8) / 8 - hidden).detach()
        with torch.no_grad():
            scale = self.gate(hidden).abs().mean()
        return self.out(torch.tanh(self.gate(rounded)) * scale)


class Lora(nn.Module):
    """Frozen weights with a low-rank update beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(8, 2))
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.base(x) + x @ self.down.T @ self.up.T))


class Attention(nn.Module):
    """Packed projection, chunk, split, scaled dot product attention with a mask, einsum, and a result that is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.gates, self.out = nn.Linear(8, 24), nn.Linear(8, 12), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.packed(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :]).transpose(1, 2).flatten(2)
        first, second = self.gates(mixed).split([8, 4], -1)
        scores = torch.einsum("bsd,bse->bde", torch.sigmoid(first), second).mean(-1)
        return {"logits": self.out(scores), "hidden": mixed}


class Indexing(nn.Module):
    """gather, scatter_add, index_put with accumulation, cumsum, where, sort and topk."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.table = nn.Linear(6, 5), nn.Parameter(torch.randn(7, 5))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        scores = self.fc(x) + self.table[index]
        picked = scores.gather(1, (index[:, None] % 5).expand(-1, 5)).cumsum(1)
        added = torch.zeros_like(scores).scatter_add(1, (index % 5)[:, None].expand(-1, 5), picked)
        placed = torch.zeros(7, 5).index_put((index,), added, accumulate=True)[index]
        best = torch.sort(placed + scores, 1).values.topk(3, 1).values
        return torch.where(best > 0, best, 0.1 * best)


def rows(*shape: int, high: int | None = None) -> Callable[[int], torch.Tensor]:
    """Inputs of a batch of any size."""
    return lambda size: torch.randn(size, *shape) if high is None else torch.randint(0, high, (size, *shape))


def visible(size: int) -> torch.Tensor:
    mask = torch.ones(size, 5, dtype=torch.bool)
    mask[::2, 3:] = False
    return mask


CASES: dict[str, tuple[type[nn.Module], list[Callable[[int], torch.Tensor]], int]] = {
    "norms": (SharedNorms, [rows(3, 6)], 3),
    "buffers": (Centred, [rows(5)], 3),
    "stopped gradients": (StraightThrough, [rows(4, high=11)], 11),
    "lora": (Lora, [rows(6)], 3),
    "attention": (Attention, [rows(5, 8), visible], 3),
    "indexing": (Indexing, [rows(6), rows(high=7)], 3),
}


def scores_of(result: Any) -> torch.Tensor:
    return result["logits"] if isinstance(result, dict) else result


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_pytorch_s_at_two_batch_sizes(name: str, tmp_path: Path) -> None:
    kind, makers, classes = CASES[name]
    torch.manual_seed(0)
    native = kind()
    batches = [[*(make(size) for make in makers), torch.randint(0, classes, (size,))] for size in (4, 6)]
    artifacts = toc.export_artifacts(native, batches[0][:-1], tmp_path)
    assert_trains_like(artifacts, native, batches, lambda m, *b: F.cross_entropy(scores_of(m(*b[:-1])), b[-1]), tmp_path)
    if name == "stopped gradients":
        assert not any(key.startswith("unused") for key in artifacts.trainable)
        assert {"unused.weight", "unused.bias"} <= artifacts.state.frozen.keys()


def test_dropout_s_backward_uses_its_own_mask_and_follows_the_seed(tmp_path: Path) -> None:
    import onnxruntime

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(40) + 0.5)
            self.plain, self.planes = nn.Dropout(0.3), nn.Dropout1d(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.planes(self.plain(x * self.weight)[:, :, None]).mean()

    artifacts = toc.export_artifacts(Dropped(), (torch.ones(3, 40),), tmp_path, loss=None)
    assert artifacts.random
    from tests.official import Official

    official, x = Official(artifacts, tmp_path), torch.ones(5, 40)
    losses = []
    for seed in (1, 2, 1):
        onnxruntime.set_seed(seed)
        official.module.lazy_reset_grad()
        losses.append(float(official.loss(x)))
        (gradient,) = (value for _, value in official.gradients())
        weight = artifacts.state.trainable["weight"].numpy()
        assert losses[-1] == pytest.approx(float((gradient * weight).sum()), rel=1e-5)  # linear in the weight under one mask
    assert losses[0] == losses[2] != losses[1]
    with torch.no_grad():
        evaluated = toc.OrtModule(artifacts).eval()(x)
    assert evaluated.item() == pytest.approx(float(weight.mean()), rel=1e-5)


def test_no_path_of_this_machine_is_in_the_graphs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    artifacts = toc.export_artifacts(Lora(), (torch.randn(2, 6),), tmp_path)
    for path in (artifacts.training_path, artifacts.eval_path):
        assert path is not None
        content = path.read_bytes()
        assert b"site-packages" not in content
        assert b"test_torch_builder" not in content
