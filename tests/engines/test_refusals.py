"""Graphs that crash ONNX Runtime 1.19.2 are rewritten or refused before they run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.engines.zoo import Family, export
from tests.models import LSTM, batch, exported, module
from tests.truth import DATA

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
    """Its gradient is rewritten; without that ORT crashes (see below)."""
    torch.manual_seed(0)
    native = Pooled()
    for options in ({}, {"dimensions": {"batch": 4}}):
        model = toc.OrtModule(pooled, engine="ort", threads=1, **options)
        for size in (4,) if options else (4, 1, 7):
            x, y = torch.randn(size, 3, 8, 8), torch.randint(0, 5, (size,))
            native.zero_grad()
            model.zero_grad()
            loss, expected = model(x, y), F.cross_entropy(native(x), y)
            loss.backward()
            expected.backward()
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(model.conv.weight.grad, native.conv.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pool", [nn.AvgPool2d(2), nn.MaxPool2d(2)], ids=["average", "maximum"])
@pytest.mark.parametrize("norm", [nn.Identity(), nn.BatchNorm2d(4)], ids=["plain", "norm"])
def test_a_pool_behind_a_dynamic_height(pool: nn.Module, norm: nn.Module, tmp_path: Path) -> None:
    """The height in front of the pool differs from the input's and has no name in the graph."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 2), norm, pool, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    axes = {"input": {0: "batch", 2: "height"}}
    artifacts = toc.export_artifacts(net, {"input": x}, tmp_path, exporter="torchscript", dynamic_shapes=axes)
    with pytest.raises(toc.CheckpointError, match=r"Pool.*(SIGFPE|segmentation fault).*dimensions="):
        toc.OrtModule(artifacts, engine="ort")(x, y)
    assert toc.OrtModule(artifacts).engine.name == "torch"  # "auto" avoids what ORT can't run
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    for sizes in ({"batch": 4, "height": 8}, {"height": 8}):
        model = toc.OrtModule(artifacts, engine="ort", dimensions=sizes, threads=1)
        found = model(x, y)
        found.backward()
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(model.get_parameter("0.weight").grad, net[0].weight.grad, rtol=1e-4, atol=1e-6)


def make_open() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> toc.Artifacts:
    dimensions = {"input": {0: "batch", 2: "height", 3: "width"}}
    folder = tmp_path_factory.mktemp("opened")
    return toc.export_artifacts(make_open(), (torch.randn(4, 3, 8, 8),), folder, dynamic_shapes=dimensions, builder="ort")


def test_max_pool_with_a_dynamic_height(opened: toc.Artifacts) -> None:
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    with pytest.raises(toc.CheckpointError, match=r"MaxPool.*segmentation fault.*dimensions="):
        toc.OrtModule(opened, engine="ort")(x, y)
    assert toc.OrtModule(opened).engine.name == "torch"
    model = toc.OrtModule(opened, engine="ort", dimensions={"height": 8, "width": 8}, threads=1)  # the batch may stay symbolic
    torch.testing.assert_close(model(x, y), F.cross_entropy(make_open()(x), y))


@pytest.fixture(scope="module")
def unrepaired(tmp_path_factory: pytest.TempPathFactory) -> toc.Artifacts:
    """As ORT's own tools make them."""
    folder = tmp_path_factory.mktemp("unrepaired")
    family = Family(Pooled, lambda: (torch.randn(4, 3, 8, 8),), target=lambda: torch.randint(0, 5, (4,)), dynamic=(0,))
    export(family, folder)
    return toc.Artifacts.load(folder)


@pytest.mark.parametrize("which", ["unrepaired", "opened"])
def test_ort_itself_dies_of_it(which: str, request: pytest.FixtureRequest) -> None:
    """The reason for the refusal. If this fails with a later ORT, the refusal can be removed."""
    artifacts: toc.Artifacts = request.getfixturevalue(which)
    code = (
        "import numpy as np, sys\nfrom onnxruntime.training import api\n"
        "state = api.CheckpointState.load_checkpoint(sys.argv[2])\nmodule = api.Module(sys.argv[1], state, None, 'cpu')\n"
        "module(np.zeros((4, 3, 8, 8), np.float32), np.zeros(4, np.int64))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(artifacts.training_path), str(artifacts.checkpoint_path)], capture_output=True, check=False
    )
    assert done.returncode < 0  # killed by a signal


def test_what_ort_s_own_tools_make_is_repaired_when_it_is_run(unrepaired: toc.Artifacts) -> None:
    x, y = torch.randn(2, 3, 8, 8), torch.randint(0, 5, (2,))
    found = []
    for engine in ("ort", "torch"):
        model = toc.OrtModule(unrepaired, engine=engine)
        model(x, y).backward()
        found.append(model.conv.weight.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_a_recurrent_layer_with_frozen_weights(tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match=r"LSTM.*segmentation fault.*weights are frozen"):
        toc.export_artifacts(module("lstm"), (batch("lstm")[0],), tmp_path, frozen=["lstm.weight_*"], exporter="torchscript")
    assert not (tmp_path / "training_model.onnx").exists()
    # Frozen by PyTorch instead: the graph computes the gradient, and it is not used.
    model = toc.OrtModule(exported("lstm"), threads=1)
    assert isinstance(module("lstm"), LSTM)
    model.lstm.requires_grad_(False)
    model(*batch("lstm")).backward()
    assert model.lstm.weight_ih_l0.grad is None
    assert model.fc.weight.grad is not None


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_a_loop_over_parameters(exporter: str, tmp_path: Path) -> None:
    """ORT's gradient builder crashes on one of them (segmentation fault) and fails on the other."""
    net = nn.Sequential(nn.EmbeddingBag(10, 6, mode="mean"), nn.Linear(6, 5))
    with pytest.raises(toc.CheckpointError, match=r"Loop.*no gradient for Loop.*EmbeddingBag"):
        toc.export_artifacts(net, (torch.randint(0, 10, (4, 5)),), tmp_path, exporter=exporter)


def test_a_parameter_without_a_fixed_shape_is_for_the_torch_engine(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "fbv2_ort1_19_2_adamw_full", tmp_path / "artifacts")
    for name in ("training_model.onnx", "eval_model.onnx"):
        model = onnx.load(folder / name)
        (value,) = (value for value in model.graph.input if value.name == "fc1.weight")
        value.type.tensor_type.shape.dim[0].dim_param = "rows"
        onnx.save(model, folder / name)
    with pytest.raises(toc.CheckpointError, match=r"fc1\.weight_grad.*: a gradient without a fixed shape\. Use engine=\"torch\""):
        toc.OrtModule(folder, engine="ort")(torch.zeros(2, 12), torch.tensor([0, 1]))
    toc.OrtModule(folder, engine="torch")(torch.zeros(2, 12), torch.tensor([0, 1])).backward()
