"""A machine with two GPUs, as the model has them."""

from __future__ import annotations

import gc
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.cuda_model.interface import Cuda
from tests.models import MODELS, batch, exported, in_ort_format, module
from torch_ort_ckpt.graphs.artifacts import OptimizerSpec

if TYPE_CHECKING:
    from tests.cuda_model.provider import Session


@pytest.fixture
def _exported(request: pytest.FixtureRequest) -> None:
    """The artifacts of the perceptron, and of the test's parameter `name`. Exporters must not run inside the model: they would trace its
    work too. For the same reason fixtures that export stand before `cuda` in a test's arguments."""
    if request.node.get_closest_marker("ort") and importlib.util.find_spec("onnxruntime"):
        parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
        for name in {"mlp", parameters.get("name", "mlp")} & MODELS.keys():
            exported(name)


@pytest.fixture
def cuda(_exported: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    model = Cuda()
    model.patch(monkeypatch)
    with model.modes():
        yield model


@pytest.fixture
def sessions(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Session]]:
    """ONNX Runtime with its CUDA provider; the sessions as they are made."""
    from tests.cuda_model import provider

    made = provider.patch(cuda, monkeypatch)
    yield made
    made.clear()
    gc.collect()  # sessions go while the model is there


@pytest.fixture
def by_ort(request: pytest.FixtureRequest) -> toc.Artifacts:
    """Artifacts whose gradients are made by ONNX Runtime's own builder; the parameter is the model's name."""
    return exported(request.param, builder="ort")


@pytest.fixture
def layernorm() -> toc.Artifacts:
    return exported("layernorm")


@pytest.fixture(scope="session")
def clipping(tmp_path_factory: pytest.TempPathFactory) -> toc.Artifacts:
    """Artifacts whose optimizer graph clips gradients."""
    folder = tmp_path_factory.mktemp("clipping")
    return toc.export_artifacts(module("mlp"), (batch("mlp")[0],), folder, optimizer=OptimizerSpec("AdamW", max_norm=0.1))


@pytest.fixture(scope="session")
def norm_used_twice(tmp_path_factory: pytest.TempPathFactory) -> toc.Artifacts:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm, self.out = nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.norm(torch.tanh(self.norm(self.fc(x)))))

    return toc.export_artifacts(Twice(), (batch("mlp")[0],), tmp_path_factory.mktemp("twice"))


@pytest.fixture(scope="session")
def ort_format(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts in ONNX Runtime's own format."""
    return in_ort_format("mlp", tmp_path_factory.mktemp("ort"))


@pytest.fixture(scope="session")
def read_by_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> toc.Artifacts:
    """Artifacts whose training graph has a node without a CUDA kernel that reads a parameter, and hands out what it computed."""
    folder = tmp_path_factory.mktemp("both")
    shutil.copytree(exported("mlp").folder, folder, dirs_exist_ok=True)
    model = onnx.load(folder / "training_model.onnx")
    model.graph.node.append(onnx.helper.make_node("Tan", ["fc1.bias"], ["tan"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("tan", onnx.TensorProto.FLOAT, [16]))
    onnx.save(model, folder / "training_model.onnx")
    return toc.Artifacts.load(folder)
