"""The types and shapes of a graph's values: as the graph declares them, and as inference finds them."""

from __future__ import annotations

import onnx
import onnx.shape_inference
from onnx import helper

from ..errors import UnsupportedError
from .description import ONNX_ERRORS, attributes, copy_of

Shape = tuple[int | None, ...]
"""None for a dimension that is not fixed."""


def shapes(model: onnx.ModelProto) -> dict[str, Shape]:
    """The declared shape of every value whose rank is known."""
    graph = model.graph
    found: dict[str, Shape] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in [*graph.value_info, *graph.output, *graph.input]:
        if value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            found[value.name] = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in dims)
    return found


def fixed(shape: Shape | None) -> tuple[int, ...] | None:
    """The sizes, if all are known."""
    sizes = tuple(size for size in shape or () if size is not None)
    return sizes if shape is not None and len(sizes) == len(shape) else None


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Value -> element type, as far as inference finds it."""
    types = {value.name: value.type.tensor_type.elem_type for value in typed_values(model)}
    types |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    return {name: kind for name, kind in types.items() if kind}


def typed_values(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Every value whose type is known or can be inferred."""
    slim = copy_of(model)
    for tensor in slim.graph.initializer:  # inference needs shapes of weights, not their data
        if tensor.raw_data and len(tensor.raw_data) > 4096:
            slim.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    kept = [tensor for tensor in slim.graph.initializer if not (tensor.raw_data and len(tensor.raw_data) > 4096)]
    del slim.graph.initializer[:]
    slim.graph.initializer.extend(kept)
    graph = _with_inferred_shapes(slim).graph
    return [value for value in [*graph.input, *graph.output, *graph.value_info] if value.type.HasField("tensor_type")]


def infer_forward(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """What shape inference finds for the values of a training graph, whatever the graph declares.

    `onnx` doesn't know ORT's own operators; those that keep the shape of their input pass it on here.
    """
    copy = copy_of(model)
    del copy.graph.value_info[:]
    for node in copy.graph.node:
        if node.domain and node.op_type in _SAME_SHAPE:
            node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output[:1]))
        elif node.op_type == "ConcatTraining":
            node.CopyFrom(helper.make_node("Concat", node.input, node.output[:1], axis=attributes(node)["axis"]))
    graph = _with_inferred_shapes(copy).graph
    return {value.name: value for value in [*graph.value_info, *graph.input]}


_SAME_SHAPE = {"BatchNormInternal", "Gelu", "FastGelu", "QuickGelu", "BiasGelu", "BiasDropout", "BitmaskDropout", "BiasSoftmax"}


def _with_inferred_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=False, data_prop=True)
    except (*ONNX_ERRORS, ValueError) as error:
        raise UnsupportedError(
            f"its shapes can't be inferred ({str(error).strip()})",
            remedy="The graph is inconsistent: export it again, with another opset or exporter.",
        ) from error
