"""Making the joint graph depends on private names of PyTorch: without the first of them there is a second way, and both are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.graphs.parity import assert_trains_like
from torch_ort_ckpt.errors import UnsupportedError
from torch_ort_ckpt.graphs.gradients import joint, private_export

aten = torch.ops.aten


class Small(nn.Module):
    """Convolution, BatchNorm with its statistics, pooling, a frozen parameter and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.rand(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.fc(torch.sin(x).flatten(1)) * self.scale + torch.tensor([0.0, 0.5, 1.0])


@pytest.fixture(params=[True, False], ids=["first way", "second way"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        assert private_export.has_first_way()
    else:
        monkeypatch.setattr(private_export, "_decompose_exported_program", None)
        monkeypatch.setattr(private_export, "joint_by_export", None)  # nobody calls it


@pytest.mark.ort
@pytest.mark.parametrize("optimize", [True, False])
def test_both_ways_give_artifacts_that_train_like_pytorch(way: None, optimize: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    native = Small()
    batches = [[torch.randn(size, 2, 4, 4), torch.randint(0, 3, (size,))] for size in (4, 6)]
    artifacts = toc.export_artifacts(native, batches[0][:1], tmp_path, optimize=optimize)
    assert_trains_like(artifacts, native, batches, lambda m, x, y: F.cross_entropy(m(x), y), tmp_path)


class Curved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.tanh(self.fc.weight.sum() * x))


def _fixing(x: torch.Tensor) -> torch.Tensor:
    """tanh, by a kernel that looks at the batch as a number, as some of PyTorch's own do."""
    assert int(x.shape[0]) > 0
    e = torch.exp(2 * x)
    return (e - 1) / (e + 1)


@pytest.mark.parametrize("name", ["joint_by_export", "joint_by_tracing"])
def test_a_size_that_becomes_a_constant_in_the_joint_graph_is_refused(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if name == "joint_by_tracing":
        monkeypatch.setattr(private_export, "_decompose_exported_program", None)
    real = getattr(private_export, name)

    def make(program: Any, table: Any) -> Any:
        return real(program, {**table, aten.tanh.default: _fixing})

    monkeypatch.setattr(private_export, name, make)
    x = torch.randn(4, 4)
    with pytest.raises(UnsupportedError, match="axis 0 of input 'x' is dynamic in the module, but became 4"):
        toc.export_artifacts(Curved(), (x,), tmp_path / "refused")
    if name == "joint_by_export":
        monkeypatch.setattr(joint, "compare_shapes", lambda *_: None)  # nothing else would notice
        toc.export_artifacts(Curved(), (x,), tmp_path / "unnoticed")
