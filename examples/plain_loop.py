"""A plain PyTorch loop over ORT training artifacts. Against the pure PyTorch version only the two lines marked `ORT` differ.

python examples/plain_loop.py [--native] [--steps 50]
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        scores: torch.Tensor = self.net(x)
        return scores if labels is None else F.cross_entropy(scores, labels)


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 16, generator=generator)
    labels = [torch.randint(0, 4, (32,), generator=generator) for _ in range(steps)]
    return [(centres[y] + torch.randn(32, 16, generator=generator), y) for y in labels]


def train_native(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for x, y in batches(steps):
        loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_ort(steps: int, folder: str) -> list[float]:
    model = toc.OrtModule(folder)  # ORT
    optimizer = toc.OrtOptimizer(model, lr=1e-2)  # ORT
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for x, y in batches(steps):
        loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--native", action="store_true", help="the pure PyTorch version")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    if options.native:
        losses = train_native(options.steps)
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            toc.export_artifacts(Classifier(), (torch.randn(2, 16),), folder)
            losses = train_ort(options.steps, folder)
    print("\n".join(f"step {step:3d}  loss {loss:.4f}" for step, loss in enumerate(losses) if step % 10 == 0 or step == len(losses) - 1))


if __name__ == "__main__":
    main()
