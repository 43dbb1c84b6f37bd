"""Graphs that take the process down in ONNX Runtime 1.19.2 are refused before they run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.models import LSTM, batch, exported, module

pytestmark = pytest.mark.ort


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.avg_pool2d(self.conv(x), 2).flatten(1))


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> toc.Artifacts:
    torch.manual_seed(0)
    return toc.export_artifacts(Pooled(), (torch.randn(4, 3, 8, 8),), tmp_path_factory.mktemp("pooled"), exporter="torchscript")


def test_average_pool_with_a_dynamic_batch(pooled: toc.Artifacts) -> None:
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    with pytest.raises(toc.CheckpointError, match=r"AveragePool.*SIGFPE.*dimensions="):
        toc.OrtModule(pooled, engine="ort")(x, y)
    assert toc.OrtModule(pooled).engine.name == "torch"  # "auto" goes around what ORT can't do
    model = toc.OrtModule(pooled, engine="ort", dimensions={"batch": 4}, threads=1)
    torch.manual_seed(0)
    native = Pooled()
    loss, expected = model(x, y), F.cross_entropy(native(x), y)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.conv.weight.grad, native.conv.weight.grad, rtol=1e-4, atol=1e-6)


def make_open() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> toc.Artifacts:
    dimensions = {"input": {0: "batch", 2: "height", 3: "width"}}
    return toc.export_artifacts(make_open(), (torch.randn(4, 3, 8, 8),), tmp_path_factory.mktemp("opened"), dynamic_shapes=dimensions)


def test_max_pool_with_a_dynamic_height(opened: toc.Artifacts) -> None:
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    with pytest.raises(toc.CheckpointError, match=r"MaxPool.*segmentation fault.*dimensions="):
        toc.OrtModule(opened, engine="ort")(x, y)
    assert toc.OrtModule(opened).engine.name == "torch"
    model = toc.OrtModule(opened, engine="ort", dimensions={"height": 8, "width": 8}, threads=1)  # the batch may stay open
    torch.testing.assert_close(model(x, y), F.cross_entropy(make_open()(x), y))


@pytest.mark.parametrize("which", ["pooled", "opened"])
def test_ort_itself_dies_of_it(which: str, request: pytest.FixtureRequest) -> None:
    """The reason for the refusal; when a later ORT survives this, the refusal can go."""
    pooled: toc.Artifacts = request.getfixturevalue(which)
    code = (
        "import numpy as np, sys\nfrom onnxruntime.training import api\n"
        "state = api.CheckpointState.load_checkpoint(sys.argv[2])\nmodule = api.Module(sys.argv[1], state, None, 'cpu')\n"
        "module(np.zeros((4, 3, 8, 8), np.float32), np.zeros(4, np.int64))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(pooled.training_path), str(pooled.checkpoint_path)], capture_output=True, check=False
    )
    assert done.returncode < 0  # killed by a signal


def test_a_recurrent_layer_with_frozen_weights(tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match=r"LSTM.*segmentation fault.*weights are frozen"):
        toc.export_artifacts(module("lstm"), (batch("lstm")[0],), tmp_path, frozen=["lstm.weight_*"], exporter="torchscript")
    assert not (tmp_path / "training_model.onnx").exists()
    # Frozen by PyTorch instead: the graph computes the gradient, nobody uses it.
    model = toc.OrtModule(exported("lstm"), threads=1)
    assert isinstance(module("lstm"), LSTM)
    model.lstm.requires_grad_(False)
    model(*batch("lstm")).backward()
    assert model.lstm.weight_ih_l0.grad is None
    assert model.fc.weight.grad is not None
