"""Graphs stamped with newer versions than ONNX Runtime loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import torch_ort_ckpt as toc
from tests.models import batch, exported
from torch_ort_ckpt.graphs.passes.versions import lower_versions

pytestmark = pytest.mark.ort


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_optimizer_graphs_that_onnxruntime_made_are_run(tmp_path: Path, kind: str) -> None:
    """With the `onnx` of today, ONNX Runtime stamps them with an IR version that it does not load."""
    from onnxruntime.training import artifacts

    values = {"w": np.ones((3, 4), np.float32), "b": np.zeros(4, np.float32)}
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    optimizer = getattr(artifacts.OptimType, kind)
    artifacts.generate_artifacts(
        model, requires_grad=list(values), loss=artifacts.LossType.MSELoss, optimizer=optimizer, artifact_directory=str(tmp_path)
    )
    stamped = onnx.load(tmp_path / "optimizer_model.onnx")
    stamped.ir_version = max(stamped.ir_version, 14)
    onnx.save(stamped, tmp_path / "optimizer_model.onnx")
    models = [toc.OrtModule(tmp_path, engine="ort", threads=1) for _ in range(2)]
    optimizers = [toc.OrtOptimizer(models[0], lr=0.1, fused=False), toc.OrtOptimizer(models[1], lr=0.1, fused=True)]
    for one, optimizer in zip(models, optimizers, strict=True):
        for _ in range(2):
            one(torch.ones(2, 3), torch.zeros(2, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(models[0].w, models[1].w, rtol=1e-5, atol=1e-6)
    assert not torch.equal(models[0].w, torch.ones(3, 4))
    assert onnx.load(tmp_path / "optimizer_model.onnx").ir_version == 14  # the file is left alone


def test_training_and_eval_graphs_are_run_too(tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    shutil.copytree(exported("mlp").folder, folder)
    for path in folder.glob("*.onnx"):
        model = onnx.load(path)
        model.ir_version = 14
        if path.name == "optimizer_model.onnx":
            next(item for item in model.opset_import if not item.domain).version = 26
        onnx.save(model, path)
    one, other = toc.OrtModule(folder, engine="ort", threads=1), toc.OrtModule(exported("mlp"), engine="ort", threads=1)
    optimizers = [toc.OrtOptimizer(model, fused=False) for model in (one, other)]
    for model, optimizer in zip((one, other), optimizers, strict=True):
        model(*batch("mlp")).backward()
        optimizer.step()
    assert one.eval()(*batch("mlp")).item() == other.eval()(*batch("mlp")).item()
    assert one.artifacts.training is not None
    assert one.artifacts.training.ir_version == 14


def test_a_graph_that_uses_something_newer_keeps_its_version() -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT4E2M1)], "new", [value], [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    assert lower_versions(model) == 0
    assert model.ir_version == 11
    del graph.node[:]
    graph.node.append(helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    assert lower_versions(model) == 1
    assert (model.ir_version, model.opset_import[0].version) == (10, 23)
