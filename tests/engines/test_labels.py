"""Labels out of range are refused, and the message has the label. (ONNX Runtime would read out of bounds.)"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.models import batch, exported, module

pytestmark = pytest.mark.ort  # the artifacts are made by ORT's own tools

ENGINES = ["ort", "torch"]


def calls(model: Any) -> dict[str, Any]:
    return {
        "forward": lambda *inputs: model.train()(*inputs),
        "eval": lambda *inputs: model.eval()(*inputs),
        "train_step": lambda *inputs: model.train().train_step(*inputs),
    }


def assert_refused(model: Any, label: int, *inputs: torch.Tensor) -> None:
    for call in calls(model).values():
        with pytest.raises(toc.CheckpointError, match=rf"(label|Target) {label} is out of (range|bounds)"):
            call(*inputs)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("label", [5, 7, -1, -99, 2**40, -(2**63), 2**63 - 1])
def test_a_label_out_of_range_is_named(engine: str, label: int) -> None:
    model = toc.OrtModule(exported("mlp"), engine=engine, threads=1)
    x, y = batch("mlp", 6)
    expected = model(x, y).item()
    wrong = y.clone()
    wrong[4] = label
    assert_refused(model, label, x, wrong)
    assert model.train()(x, y).item() == expected


@pytest.fixture(scope="module")
def ignoring(tmp_path_factory: pytest.TempPathFactory) -> toc.Artifacts:
    """The MLP with a loss whose `ignore_index` is -7."""
    folder = tmp_path_factory.mktemp("ignoring") / "artifacts"
    shutil.copytree(exported("mlp", "torchscript").folder, folder)
    for name in ("training_model.onnx", "eval_model.onnx"):
        model = onnx.load(folder / name)
        for node in model.graph.node:
            if node.op_type.startswith("SoftmaxCrossEntropyLoss"):
                kept = [attribute for attribute in node.attribute if attribute.name != "ignore_index"]
                del node.attribute[:]
                node.attribute.extend(kept)
                node.attribute.append(helper.make_attribute("ignore_index", -7))
        onnx.save(model, folder / name)
    return toc.Artifacts.load(folder)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_label_that_the_loss_leaves_out_is_in_range(ignoring: toc.Artifacts, engine: str) -> None:
    model, native = toc.OrtModule(ignoring, engine=engine, threads=1), module("mlp")
    x, y = batch("mlp", 6)
    y[1] = y[3] = -7
    expected = F.cross_entropy(native(x), y, ignore_index=-7)
    for call in calls(model).values():
        torch.testing.assert_close(call(x, y).detach(), expected.detach(), rtol=1e-5, atol=1e-6)
    y[2] = 9
    assert_refused(model, 9, x, y)
    y[2] = -8
    assert_refused(model, -8, x, y)


class Shifted(nn.Module):
    """A language model: the label of a token is the next one, so the first label is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.fc(self.embedding(x))
        return F.cross_entropy(scores[:, :-1].reshape(-1, 9), labels[:, 1:].reshape(-1))


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> tuple[toc.Artifacts, nn.Module]:
    torch.manual_seed(0)
    native = Shifted()
    inputs = torch.randint(0, 9, (2, 5)), torch.randint(0, 9, (2, 5))
    return toc.export_artifacts(native, inputs, tmp_path_factory.mktemp("shifted"), loss=None, exporter="torchscript"), native


@pytest.mark.parametrize("engine", ENGINES)
def test_labels_that_the_graph_computes_are_looked_at_too(shifted: tuple[toc.Artifacts, nn.Module], engine: str) -> None:
    artifacts, native = shifted
    model = toc.OrtModule(artifacts, engine=engine, threads=1)
    for size in (2, 3):
        x, labels = torch.randint(0, 9, (size, 5)), torch.randint(0, 9, (size, 5))
        labels[0, 2] = -100  # ignored
        labels[:, 0] = 1000  # not used
        native.zero_grad()
        expected = native(x, labels)
        expected.backward()
        for how, call in calls(model).items():
            model.zero_grad()
            found = call(x, labels)
            torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
            if how != "eval":
                found.backward() if how == "forward" else None
                torch.testing.assert_close(model.fc.weight.grad, native.fc.weight.grad, rtol=1e-4, atol=1e-6)
        for label in (9, 1000, -1, 2**40):
            labels[1, 3] = label
            assert_refused(model, label, x, labels)


def test_an_unknown_number_of_classes_is_asked_of_the_scores(tmp_path: Path) -> None:
    """The number of classes is symbolic in the graph and known only at run time."""
    loss = helper.make_node("SoftmaxCrossEntropyLoss", ["sum", "labels"], ["loss", "log_prob"], reduction="mean")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "bias"], ["sum"]), loss],
        "any",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "classes"]),
            helper.make_tensor_value_info("labels", TensorProto.INT64, ["batch"]),
            helper.make_tensor_value_info("bias", TensorProto.FLOAT, [1]),
        ],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), tmp_path / "eval_model.onnx")
    toc.save(toc.CheckpointState(trainable={"bias": torch.ones(1)}), tmp_path / "checkpoint")
    model = toc.OrtModule(tmp_path, engine="ort", threads=1).eval()
    for classes in (3, 6):
        x = torch.randn(2, classes)
        labels = torch.tensor([0, classes - 1])
        torch.testing.assert_close(model(x, labels), F.cross_entropy(x + 1, labels), rtol=1e-5, atol=1e-6)
        for label in (classes, -1):
            with pytest.raises(toc.CheckpointError, match=f"label {label} is out of range"):
                model(x, torch.tensor([0, label]))


def test_the_ignored_label_as_an_input_of_the_loss(tmp_path: Path) -> None:
    """As ONNX Runtime's own operator takes it."""
    loss = helper.make_node(
        "SoftmaxCrossEntropyLossInternal", ["sum", "labels", "", "ignored"], ["loss", "log_prob"], domain="com.microsoft", reduction="mean"
    )
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "bias"], ["sum"]), loss],
        "internal",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4]),
            helper.make_tensor_value_info("labels", TensorProto.INT64, ["batch"]),
            helper.make_tensor_value_info("bias", TensorProto.FLOAT, [1]),
        ],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(np.array(-5, np.int64), "ignored")],
    )
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "eval_model.onnx")
    toc.save(toc.CheckpointState(trainable={"bias": torch.ones(1)}), tmp_path / "checkpoint")
    model = toc.OrtModule(tmp_path, engine="ort", threads=1).eval()
    x, labels = torch.randn(3, 4), torch.tensor([1, -5, 3])
    torch.testing.assert_close(model(x, labels), F.cross_entropy(x, labels, ignore_index=-5), rtol=1e-5, atol=1e-6)
    with pytest.raises(toc.CheckpointError, match="label 4 is out of range"):
        model(x, torch.tensor([1, -5, 4]))
