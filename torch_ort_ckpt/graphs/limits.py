"""Training graphs that ONNX Runtime 1.19.2 computes wrongly or crashes on, and that no rewrite fixes.

Missing kernels are not covered: ORT itself reports them, with the node, when it creates a session.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import onnx
from onnx import numpy_helper

from ..errors import UnsupportedError
from .description import RECURRENT_OPS, all_nodes, attributes, gradient_names, reads
from .shapes import Shape, shapes

_FIX = 'Fix every symbolic dimension: OrtModule(..., dimensions={"batch": 8}); or use engine="torch".'


@dataclass(frozen=True)
class Graph:
    """The facts about a graph that the limits check."""

    model: onnx.ModelProto
    shapes: dict[str, Shape]
    gradients: dict[str, str]


Limit = Callable[[Graph, onnx.NodeProto], tuple[str, str] | None]


def refuse_wrong(model: onnx.ModelProto, path: str | os.PathLike[str] | None = None) -> None:
    """Raise, naming the node, for a graph that is still computed wrongly after `repair_training`."""
    _refuse(model, _LIMITS, path)


def refuse_frozen_recurrent(model: onnx.ModelProto, path: str | os.PathLike[str] | None = None) -> None:
    """Raise only for graphs that crash ORT at any size: such artifacts are useless."""
    _refuse(model, dict.fromkeys(RECURRENT_OPS, _frozen_recurrent), path)


def refuse_control_flow(model: onnx.ModelProto, trainable: Iterable[str]) -> None:
    """Raise for a forward graph with an If, Loop or Scan between a parameter and the loss: ORT's gradient builder may crash on it."""
    trainable = set(trainable)
    depends = set(trainable)
    for node in model.graph.node:
        if node.op_type in _WITHOUT_GRADIENT or not depends.intersection(reads(node)):
            continue
        if node.op_type in ("If", "Loop", "Scan"):
            parameters = sorted(trainable.intersection(reads(node)))
            raise UnsupportedError(
                f"ONNX Runtime has no gradient for {node.op_type}" + (f", which reads {', '.join(parameters)}" if parameters else ""),
                field=f"{node.op_type} {node.name}".strip(),
                remedy="Replace what is exported this way (EmbeddingBag by Embedding and a sum, a loop by its steps).",
            )
        depends.update(node.output)


_WITHOUT_GRADIENT = {"Shape", "Size", "ArgMax", "ArgMin", "NonZero", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not"}


def _refuse(model: onnx.ModelProto, limits: Mapping[str, Limit], path: str | os.PathLike[str] | None) -> None:
    graph = Graph(model, shapes(model), gradient_names(model))
    for node in all_nodes(model.graph):
        limit = limits.get(node.op_type)
        reason = limit(graph, node) if limit is not None else None
        if reason is not None:
            what, remedy = reason
            raise UnsupportedError(what, path=path, field=f"{node.op_type} {node.name}".strip(), remedy=remedy)


def _max_pool(graph: Graph, node: onnx.NodeProto) -> tuple[str, str] | None:
    if graph.gradients and attributes(node).get("storage_order"):
        return "ONNX Runtime computes a wrong gradient for storage_order=1", 'Use storage_order=0, or engine="torch".'
    return None


def _max_pool_gradient(graph: Graph, node: onnx.NodeProto) -> tuple[str, str] | None:
    if None in graph.shapes.get(node.output[0], (None, None))[1:]:
        return "crashes ONNX Runtime (segmentation fault) when height, width or channels are dynamic", _FIX
    return None


def _average_pool(graph: Graph, node: onnx.NodeProto) -> tuple[str, str] | None:
    settings = attributes(node)
    if settings.get("ceil_mode") and settings.get("count_include_pad"):
        return "ONNX Runtime divides by the wrong number for ceil_mode=1 with count_include_pad=1", 'Use engine="torch".'
    return None


def _average_pool_gradient(graph: Graph, node: onnx.NodeProto) -> tuple[str, str] | None:
    shape = graph.shapes.get(node.output[0])
    if shape is None or None in shape:
        return "crashes ONNX Runtime (division by zero, SIGFPE) when height, width or channels are dynamic", _FIX
    if attributes(node).get("auto_pad", b"NOTSET") != b"NOTSET" or len(shape) > 4:
        return "ONNX Runtime computes it wrongly", 'Use engine="torch".'
    return None


def _convolution_gradient(graph: Graph, node: onnx.NodeProto) -> tuple[str, str] | None:
    """What the rewrites leave: a kernel or a size that isn't known."""
    settings, weight = attributes(node), graph.shapes.get(node.input[2], ())
    rank = len(settings.get("kernel_shape") or weight[2:])
    if settings.get("auto_pad", b"NOTSET").startswith(b"SAME"):
        return "ONNX Runtime leaves out the padding of auto_pad in the gradient", _FIX
    if settings.get("group", 1) > 1 and rank != 2:
        return "ONNX Runtime computes wrong gradients for a convolution in groups whose weight has no fixed shape", 'Use engine="torch".'
    return None


def _slice_gradient(graph: Graph, node: onnx.NodeProto) -> tuple[str, str] | None:
    steps = next((tensor for tensor in graph.model.graph.initializer if tensor.name in node.input[5:]), None)
    if steps is not None and numpy_helper.to_array(steps).min() < 0:
        return "ONNX Runtime can't run it for a negative step (a flip)", 'Use engine="torch".'
    return None


def _recurrent(graph: Graph, node: onnx.NodeProto) -> tuple[str, str] | None:
    if attributes(node).get("direction", b"forward") != b"forward" and node.op_type.endswith("Training"):
        return "ONNX Runtime trains recurrent layers forwards only, neither backwards nor in both directions", 'Use engine="torch".'
    return _frozen_recurrent(graph, node)


def _frozen_recurrent(graph: Graph, node: onnx.NodeProto) -> tuple[str, str] | None:
    frozen = [name for name in node.input[1:3] if name and _comes_from_frozen(graph, name)]
    if graph.gradients and frozen:
        return (
            f"ONNX Runtime crashes (segmentation fault) on a recurrent layer whose weights are frozen: {', '.join(frozen)}",
            'Export with these weights trainable and leave them out of the optimizer; or use engine="torch".',
        )
    return None


def _comes_from_frozen(graph: Graph, name: str) -> bool:
    """Whether a value is computed from constants and frozen parameters only."""
    producers = {output: node for node in graph.model.graph.node for output in node.output}
    waiting, seen = [name], set()
    while waiting:
        current = waiting.pop()
        if current in graph.gradients:
            return False
        if current in producers and current not in seen:
            seen.add(current)
            waiting.extend(producers[current].input)
    return True


_LIMITS: Mapping[str, Limit] = {
    "MaxPool": _max_pool,
    "MaxPoolGrad": _max_pool_gradient,
    "AveragePool": _average_pool,
    "AveragePoolGrad": _average_pool_gradient,
    "ConvGrad": _convolution_gradient,
    "SliceGrad": _slice_gradient,
    **dict.fromkeys(RECURRENT_OPS, _recurrent),
}
