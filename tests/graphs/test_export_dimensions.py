"""A dimension that was asked to be dynamic is dynamic, or the export fails and says which one is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc

pytestmark = pytest.mark.ort


class Recurrent(nn.Module):
    """Loops over the sequence in Python, as RWKV does: a tracer unrolls the example's length."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = torch.tanh(self.fc(x[:, step]) + state)
        return self.out(state)


class Reshaping(nn.Module):
    """Uses the example's length as a Python number, which the tracer makes a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x * torch.ones(int(x.shape[1]), 1)).mean(1)


SHAPES = {"x": {0: "batch", 1: "seq"}}


@pytest.mark.parametrize("exporter", ["auto", "torchscript", "dynamo"])
@pytest.mark.parametrize("kind", [Recurrent, Reshaping])
def test_a_dimension_that_the_module_fixes_is_an_error(kind: type[nn.Module], exporter: str, tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    with pytest.raises(toc.CheckpointError, match="seq"):
        toc.export_artifacts(kind(), (torch.randn(2, 12, 4),), folder, dynamic_shapes=SHAPES, exporter=exporter)
    assert not folder.exists()


def test_a_batch_of_one_size_only_is_an_error_too(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) * torch.arange(1, int(x.shape[0]) + 1)[:, None]

    with pytest.raises(toc.CheckpointError, match="dimension 'batch' was asked to be dynamic"):
        toc.export_artifacts(Fixed(), (torch.randn(2, 4),), tmp_path / "a", exporter="torchscript")
    artifacts = toc.export_artifacts(Fixed(), (torch.randn(2, 4),), tmp_path / "b", exporter="torchscript", dynamic_shapes={})
    assert artifacts.dimensions == []


def test_a_graph_that_computes_something_else_is_an_error(tmp_path: Path) -> None:
    class Counting(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Counting.calls += 1
            return self.fc(x) * Counting.calls

    with pytest.raises(toc.CheckpointError, match="does not compute what the module does"):
        toc.export_artifacts(Counting(), (torch.randn(2, 4),), tmp_path, exporter="torchscript")
