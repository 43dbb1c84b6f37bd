"""Small graphs for the tests of passes, and what they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

Shape = Sequence[int | str | None]


def node(op_type: str, inputs: str, outputs: str, **settings: Any) -> onnx.NodeProto:
    """`inputs` and `outputs` are names, separated by spaces; `_` stands for one that is left out."""
    read, written = ([name if name != "_" else "" for name in names.split()] for names in (inputs, outputs))
    return helper.make_node(op_type, read, written, **settings)


def value(name: str, shape: Shape | None, element_type: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element_type, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Mapping[str, Any] | None = None,
    *,
    inner: Sequence[onnx.ValueInfoProto] = (),
    opset: int = 17,
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, tensors, value_info=inner)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def kinds(graph: onnx.ModelProto) -> list[str]:
    return [item.op_type for item in graph.graph.node]


def compute(graph: onnx.ModelProto, **feeds: Any) -> list[Any]:
    """By the `onnx` package, which knows the standard operators only."""
    return list(ReferenceEvaluator(graph).run(None, feeds))


def compute_by_ort(graph: onnx.ModelProto, **feeds: Any) -> list[Any]:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    return list(onnxruntime.InferenceSession(graph.SerializeToString(), settings, providers=["CPUExecutionProvider"]).run(None, feeds))


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
