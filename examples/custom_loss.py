"""Artifacts with a loss of one's own, plain PyTorch: a focal loss with weights for the samples. Needs no onnxruntime.

python examples/custom_loss.py [--steps 40]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc


def focal_loss(scores: torch.Tensor, labels: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """Rare and difficult samples count more. The graph's inputs get the names of the arguments: `labels` and `importance`."""
    entropy = F.cross_entropy(scores, labels, reduction="none")
    return (importance * (1 - torch.exp(-entropy)) ** 2 * entropy).sum() / importance.sum()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Hardswish(), nn.Linear(32, 3))


def batch(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Class 2 is rare and counts ten times as much."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor([0.5, 0.45, 0.05]), size, replacement=True, generator=generator)
    centres = torch.randn(3, 8, generator=torch.Generator().manual_seed(7))
    return centres[labels] + 0.5 * torch.randn(size, 8, generator=generator), labels, torch.where(labels == 2, 10.0, 1.0)


def main(folder: Path, steps: int = 40) -> tuple[list[float], list[float]]:
    """The losses of the artifacts, and those of the same loop in PyTorch."""
    native = network()
    artifacts = toc.export_artifacts(native, batch(4, 0), folder, loss=focal_loss, optimizer="adamw")
    print("inputs:", ", ".join(str(spec) for spec in artifacts.inputs))
    model = toc.OrtModule(artifacts)
    optimizer = toc.OrtOptimizer(model, lr=1e-2)
    twin = torch.optim.AdamW(native.parameters(), lr=1e-2)
    ours, theirs = [], []
    for step in range(steps):
        inputs, labels, importance = batch(32, step)
        loss = model(inputs, labels, importance)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ours.append(loss.item())
        expected = focal_loss(native(inputs), labels, importance)
        expected.backward()
        twin.step()
        twin.zero_grad()
        theirs.append(expected.item())
    print(f"loss {ours[0]:.4f} -> {ours[-1]:.4f}; PyTorch alone {theirs[0]:.4f} -> {theirs[-1]:.4f}")
    return ours, theirs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    with tempfile.TemporaryDirectory() as place:
        main(Path(place), parser.parse_args().steps)
