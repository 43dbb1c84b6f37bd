"""What passes over a joint graph look up: the shapes that PyTorch's exporter declares for its values, and the values of constants."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import numpy_helper

from ..description import spec_of

Sizes = tuple[int | str, ...]
"""Symbolic sizes are the text of their expression: equal texts are equal sizes."""


def declared_shapes(model: onnx.ModelProto) -> dict[str, Sizes]:
    """The shape of every value of which all sizes are known, as numbers or symbols."""
    graph = model.graph
    found: dict[str, Sizes] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.value_info, *graph.output, *graph.input):
        shape = spec_of(value).shape
        if shape is not None and "?" not in shape:
            found[value.name] = shape
    return found


def constants_of(graph: onnx.GraphProto) -> dict[str, Any]:
    """Constant -> its array, for those of at most a few elements."""
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if _is_small(tensor)}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value" and _is_small(node.attribute[0].t):
            found[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return found


def _is_small(tensor: onnx.TensorProto) -> bool:
    return sum(tensor.dims) <= 64 and not tensor.external_data
