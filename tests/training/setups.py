"""Small trainings that the tests of this folder run: one on real ORT artifacts, one on a plain module, both with dropout or shuffling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_ort_ckpt as toc
from tests.truth import DATA

ADAMW = DATA / "fbv2_ort1_19_2_adamw_full"


@dataclass
class Setup:
    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        if isinstance(self.model, nn.Sequential):
            return nn.functional.cross_entropy(self.model(x), y)
        return self.model(x, y)


def plain(seed: int = 0) -> Setup:
    """Linear, BatchNorm (buffers), Dropout (random numbers), AdamW, StepLR."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Setup(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7))


def graph(seed: int = 0) -> Setup:
    """ORT's artifacts, run by ORT, updated by the optimizer graph."""
    torch.manual_seed(seed)
    model = toc.OrtModule(ADAMW, threads=1)
    optimizer = toc.OrtOptimizer(model, lr=1e-2)
    return Setup(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7))


def data(count: int = 40, batch_size: int = 4, features: int = 6, classes: int = 3, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, features, generator=generator)
    y = torch.randint(0, classes, (count,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, **({"shuffle": True} | options))


def data_for(setup: Setup, **options: Any) -> DataLoader[Any]:
    if isinstance(setup.model, nn.Sequential):
        return data(**options)
    features = int(setup.model.artifacts.inputs[0].shape[1])
    return data(features=features, classes=2, **options)


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def files_of(folder: Path) -> set[str]:
    return {place.name for place in folder.iterdir()}
