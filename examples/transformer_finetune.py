"""Fine-tune a small transformer from ORT artifacts: a frozen embedding, clipping, a schedule, evaluation, a checkpoint, an inference model.

python examples/transformer_finetune.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import torch_ort_ckpt as toc

TOKENS, LENGTH = 16, 10


class Classifier(nn.Module):
    """Does token 1 occur more often than token 2?"""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def batch(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 4, (size, LENGTH), generator=torch.Generator().manual_seed(seed))
    return tokens, ((tokens == 1).sum(1) > (tokens == 2).sum(1)).long()


def main(folder: Path, steps: int = 150) -> tuple[float, float]:
    """Loss on unseen data before and after."""
    torch.manual_seed(0)
    toc.export_artifacts(Classifier(), (batch(4, 0)[0],), folder, frozen=["embedding.*"])

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
    after = evaluate(model, *unseen)
    print(f"engine {model.engine.name}: loss on unseen data {before:.3f} -> {after:.3f}")

    toc.save(model.checkpoint(optimizer, scheduler=scheduler), folder / "checkpoint")
    model.export_inference(folder / "inference.onnx")
    print(f"saved: {toc.load(folder / 'checkpoint')}")
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
