"""A reduction that keeps its axes with size 1, and a Reshape that removes them again: how PyTorch sums the gradient of a bias.

One node does both. In a network of many small layers that is one node in ten.
"""

from __future__ import annotations

import onnx

from ..description import attributes, reads
from .declared_shapes import constants_of, declared_shapes
from .rewriting import set_items

_REDUCTIONS = frozenset({"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"})


def reduce_without_axes(model: onnx.ModelProto) -> int:
    """Values are renamed so that the reduction produces what the Reshape did. Needs declared shapes."""
    graph = model.graph
    shapes, constants = declared_shapes(model), constants_of(graph)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in reads(node):
            readers.setdefault(name, []).append(node)
    results = {value.name for value in graph.output}
    removed = set()
    for node in graph.node:
        if node.op_type not in _REDUCTIONS or not attributes(node).get("keepdims", 1) or len(node.input) < 2:
            continue
        axes, before, wide = constants.get(node.input[1]), shapes.get(node.input[0]), node.output[0]
        users = readers.get(wide, [])
        if axes is None or before is None or len(users) != 1 or wide in results or users[0].op_type not in ("Reshape", "Squeeze"):
            continue
        gone = {int(axis) % len(before) for axis in axes.reshape(-1)}
        narrow = users[0].output[0]
        if not gone or shapes.get(narrow) != tuple(size for axis, size in enumerate(before) if axis not in gone):
            continue
        set_items(node.attribute, [item for item in node.attribute if item.name != "keepdims"])
        node.attribute.append(onnx.helper.make_attribute("keepdims", 0))
        node.output[0] = narrow
        removed.add(id(users[0]))
    if removed:
        set_items(graph.node, [node for node in graph.node if id(node) not in removed])
        set_items(graph.value_info, [value for value in graph.value_info if any(value.name in node.output for node in graph.node)])
    return len(removed)
