"""What the `onnx` package raises about a graph reaches the user as a `CheckpointError`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import torch_ort_ckpt as toc
from torch_ort_ckpt.graphs.gradients.ort_builder import build_gradients
from torch_ort_ckpt.graphs.passes.instance_norm import decompose_instance_norm
from torch_ort_ckpt.graphs.shapes import element_types
from torch_ort_ckpt.graphs.translation import translate


def contradictory() -> onnx.ModelProto:
    """A Transpose of a matrix that names three axes."""
    graph = helper.make_graph(
        [helper.make_node("Transpose", ["x"], ["y"], name="turn", perm=[0, 2, 1])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ones(1, np.float32), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


@pytest.mark.parametrize("use", [decompose_instance_norm, element_types], ids=lambda use: use.__name__)
def test_a_model_whose_shapes_can_t_be_inferred(use: Callable[[onnx.ModelProto], Any]) -> None:
    model = contradictory()
    model.graph.node[0].domain = "acme"  # of which the model imports no version
    model.graph.node.append(helper.make_node("InstanceNormalization", ["y", "w", "w"], ["z"]))
    with pytest.raises(toc.CheckpointError, match="shapes can't be inferred"):
        use(model)


@pytest.mark.ort
def test_what_ort_s_own_tools_ask_of_onnx() -> None:
    with pytest.raises(toc.CheckpointError, match="can't build the gradient graph"):
        build_gradients(contradictory(), ["w"], [], "mse", None, [])


class Turned(nn.Module):
    """PyTorch's older exporter writes the axes as they are here, and ONNX wants them counted from the front."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.permute(0, -2, -1, 1).mean(-1).mean(-2))


@pytest.mark.ort
def test_axes_counted_from_the_end_are_repaired(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x, labels = Turned(), torch.randn(2, 5, 6, 4), torch.tensor([0, 2])
    artifacts = toc.export_artifacts(module, (x,), tmp_path, exporter="torchscript")
    expected = nn.functional.cross_entropy(module(x), labels)
    for engine in ("ort", "torch"):
        torch.testing.assert_close(toc.OrtModule(artifacts, engine=engine)(x, labels), expected)


def test_a_function_that_can_t_be_inlined() -> None:
    """A function of the model that calls itself."""
    function = helper.make_function(
        "acme", "Again", ["a"], ["b"], [helper.make_node("Again", ["a"], ["b"], domain="acme")], [helper.make_opsetid("acme", 1)]
    )
    graph = helper.make_graph(
        [helper.make_node("Again", ["x"], ["y"], domain="acme")],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("acme", 1)], functions=[function])
    with pytest.raises(toc.CheckpointError, match="functions can't be inlined"):
        translate(model)


@pytest.mark.parametrize(
    "tensor",
    [
        TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[4], raw_data=b"\0" * 7),
        TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[4], raw_data=b"\0" * 8),
        TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[-1], raw_data=b""),
        TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[2], int64_data=[1]),
        TensorProto(name="c", data_type=77, dims=[2], raw_data=b"\0" * 8),
    ],
    ids=["odd bytes", "too few", "negative", "other field", "unknown type"],
)
def test_constants_that_are_not_what_they_say(tensor: TensorProto) -> None:
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "c"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
        [tensor],
    )
    with pytest.raises(toc.CheckpointError, match=r"^c: a constant|element type 77"):
        translate(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))


def test_an_attribute_that_only_a_function_could_have() -> None:
    model = contradictory()
    model.graph.node[0].attribute[0].ref_attr_name = "axes of the function around it"
    with pytest.raises(toc.CheckpointError, match=r"^perm: an attribute"):
        translate(model)


@pytest.mark.parametrize("content", [b"", b"\x08", b"not a model", b"\x3a\xff\xff\xff\xff\x0f", b"\x3a\x02\x0a\xff"])
def test_files_that_are_no_models(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "training_model.onnx").write_bytes(content)
    (tmp_path / "eval_model.onnx").write_bytes(content)
    with pytest.raises(toc.CheckpointError):
        toc.OrtModule(toc.Artifacts.load(tmp_path, checkpoint=toc.CheckpointState({"w": torch.ones(1)})), engine="torch")
