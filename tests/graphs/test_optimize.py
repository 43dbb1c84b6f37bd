"""`export_artifacts(optimize=)`: the fast graph and the plain one train like PyTorch, at every size."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.graphs.parity import assert_trains_like
from tests.official import Official

pytestmark = pytest.mark.ort

_KEEP = tempfile.TemporaryDirectory(prefix="toc-optimize-")


class Convolutions(nn.Module):
    """What has a fast form: convolutions of several kinds, a BatchNorm used twice, ReLU, pools, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.strided = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Conv2d(4, 6, 3, 2, 1, bias=False)
        self.depthwise, self.pointwise = nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), nn.Conv2d(4, 4, 1, bias=False)
        self.grouped = nn.Conv2d(6, 4, 3, padding=1, groups=2)
        self.one, self.twice, self.last = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(6)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.one(self.first(x))), 2)
        x = self.twice(self.pointwise(torch.relu(self.twice(self.depthwise(x)))))
        x = torch.relu(self.last(self.strided(F.avg_pool2d(x, 2))))
        return self.fc(self.grouped(x).mean([2, 3]))


class Turned(nn.Module):
    """A permutation that moves nothing, in front of a linear layer: ONNX Runtime takes any Transpose there for one that swaps the axes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.tanh(x).permute(0, 1))


def loss_of(module: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(x), labels)


def batches(*shapes: Sequence[int]) -> list[list[torch.Tensor]]:
    return [[torch.randn(*shape), torch.randint(0, 3, shape[:1])] for shape in shapes]


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return Convolutions()


@functools.cache
def exported(optimize: bool) -> toc.Artifacts:
    """Made once: exporting takes longer than the tests."""
    return toc.export_artifacts(convolutions(), (torch.randn(4, 3, 16, 16),), Path(_KEEP.name, str(optimize)), optimize=optimize)


@pytest.mark.parametrize("optimize", [True, False])
def test_convolutions_with_a_dynamic_batch(optimize: bool, tmp_path: Path) -> None:
    native, data, artifacts = convolutions(), batches((4, 3, 16, 16), (7, 3, 16, 16), (2, 3, 16, 16)), exported(optimize)
    assert_trains_like(artifacts, native, data, loss_of, tmp_path)
    kinds = {node.op_type for node in artifacts.training.graph.node}
    assert ("SpaceToDepth" in kinds, "BatchNormalization" in kinds, "HardSigmoid" in kinds) == (optimize,) * 3
    # The forward stays what it was, for those who differentiate it again.
    pools = [node for node in artifacts.training.graph.node if node.op_type == "MaxPool"]
    assert all(len(node.output) == (1 if optimize else 2) for node in pools)


def test_convolutions_with_dynamic_height_and_width(tmp_path: Path) -> None:
    torch.manual_seed(0)
    native, data = convolutions(), batches((4, 3, 16, 12), (3, 3, 8, 20), (5, 3, 20, 24))
    shapes = {"x": {0: "batch", 2: "height", 3: "width"}}
    artifacts = toc.export_artifacts(native, data[0][:1], tmp_path, dynamic_shapes=shapes)
    assert_trains_like(artifacts, native, data, loss_of, tmp_path)


@pytest.mark.parametrize("optimize", [True, False])
def test_a_permutation_that_moves_nothing(optimize: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    native, data = Turned(), batches((4, 4), (5, 4))
    artifacts = toc.export_artifacts(native, data[0][:1], tmp_path, optimize=optimize)
    assert_trains_like(artifacts, native, data, loss_of, tmp_path)


def test_ten_steps_of_both_graphs(tmp_path: Path) -> None:
    """Statistics that layers shared by mistake would show only after some steps."""
    torch.manual_seed(0)
    native, (batch,) = convolutions(), batches((6, 3, 16, 16))
    losses = []
    for optimize in (True, False):
        official = Official(exported(optimize), tmp_path)
        losses.append([float(official.step(*batch)) for _ in range(10)])
    optimizer, expected = torch.optim.AdamW(native.parameters()), []
    for _ in range(10):
        optimizer.zero_grad()
        loss = loss_of(native, *batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] == pytest.approx(expected, rel=1e-4)
