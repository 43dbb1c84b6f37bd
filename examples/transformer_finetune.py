"""Teach a small transformer whether a film review is good or bad, from ORT artifacts: a frozen embedding, clipping, a schedule,
evaluation, a checkpoint, an inference model, and what it says about sentences it has not seen.

python examples/transformer_finetune.py
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch
from torch import nn

import torch_ort_ckpt as toc

GOOD = ["great", "wonderful", "moving", "funny", "clever", "brilliant"]
BAD = ["boring", "terrible", "awful", "dull", "silly", "weak"]
OTHERS = ["the", "film", "story", "music", "ending", "cast", "was", "is", "really", "very", "quite", "not", "at", "all"]
WORDS = ["<pad>", *OTHERS, *GOOD, *BAD]
LENGTH = 8


class Reader(nn.Module):
    """Two layers over the words of a review; 0 is bad, 1 is good."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), 32)
        self.places = nn.Parameter(torch.randn(LENGTH, 32) * 0.1)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.words(tokens) + self.places).mean(1))


def review(rng: random.Random) -> tuple[str, int]:
    """A sentence and whether it is good: "the music was not very funny" is bad."""
    good, negated = rng.random() < 0.5, rng.random() < 0.4
    words = ["the", rng.choice(["film", "story", "music", "ending", "cast"]), rng.choice(["was", "is"])]
    words += ["not"] if negated else []
    words += [rng.choice(["really", "very", "quite"])] if rng.random() < 0.5 else []
    return " ".join([*words, rng.choice(GOOD if good else BAD)]), int(good != negated)


def encode(sentences: list[str]) -> torch.Tensor:
    return torch.tensor([([WORDS.index(word) for word in text.split()] + [0] * LENGTH)[:LENGTH] for text in sentences])


def batch(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = random.Random(seed)
    sentences, labels = zip(*(review(rng) for _ in range(size)), strict=True)
    return encode(list(sentences)), torch.tensor(labels)


def main(folder: Path, steps: int = 150) -> tuple[float, float]:
    """Loss on unseen reviews before and after."""
    torch.manual_seed(0)
    toc.export_artifacts(Reader(), (batch(4, 0)[0],), folder, frozen=["words.*"])

    model = toc.OrtModule(folder)
    optimizer = toc.OrtOptimizer(model, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    unseen = batch(500, seed=10_000)
    before = evaluate(model, *unseen)
    for step in range(steps):
        loss = model(*batch(32, seed=step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {float(loss.detach()):.3f}")
    after = evaluate(model, *unseen)
    print(f"engine {model.engine.name}: loss on unseen reviews {before:.3f} -> {after:.3f}")

    toc.save(model.checkpoint(optimizer, scheduler=scheduler), folder / "checkpoint")
    model.export_inference(folder / "inference.onnx", ["output"])
    print(f"saved: {toc.load(folder / 'checkpoint')}")

    sentences = ["the cast was not at all dull", "the film is really clever", "the ending was not funny"]
    reader = toc.to_torch_module(folder, outputs=["output"])  # plain PyTorch, from the same files
    for text, sure in zip(sentences, reader(encode(sentences)).softmax(1)[:, 1].tolist(), strict=True):
        print(f"  {text}: good with {sure:.0%}")
    return before, after


def evaluate(model: toc.OrtModule, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        loss = float(model(tokens, labels))
    model.train()
    return loss


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place))
