"""Split instead of SplitToSequence, where the parts are taken out of the sequence one by one.

PyTorch's exporter writes `split`, `chunk` and `unbind` as sequences. ONNX Runtime has SplitToSequence on the CPU only, so that a graph on
CUDA waits for the host in every step, copies each part twice, and can't differentiate it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..description import attributes, reads
from .declared_shapes import constants_of, declared_shapes
from .rewriting import set_items


def split_without_sequences(model: onnx.ModelProto) -> int:
    """Sequences whose sizes are not constant, or that are used as a whole, stay. Equal sizes need the declared shape of the input."""
    graph = model.graph
    constants, shapes = constants_of(graph), declared_shapes(model)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in reads(node):
            readers.setdefault(name, []).append(node)
    outputs = {value.name for value in graph.output}
    new: dict[int, list[onnx.NodeProto]] = {}
    count = 0
    for node in graph.node:
        if node.op_type != "SplitToSequence" or node.output[0] in outputs or len(node.input) < 2:
            continue
        axis = int(attributes(node).get("axis", 0))
        sizes = _sizes(constants.get(node.input[1]), shapes.get(node.input[0]), axis)
        taken = readers.get(node.output[0], [])
        if sizes is None or not all(item.op_type == "SequenceAt" and constants.get(item.input[1]) is not None for item in taken):
            continue
        parts = [f"{node.output[0]}/part{place}" for place in range(len(sizes))]
        lengths = numpy_helper.from_array(np.array(sizes, np.int64), f"{node.output[0]}/sizes")
        graph.initializer.append(lengths)
        new[id(node)] = [helper.make_node("Split", [node.input[0], lengths.name], parts, name=node.name, axis=axis)]
        for item in taken:
            part = parts[int(constants[item.input[1]])]
            new[id(item)] = [helper.make_node("Identity", [part], list(item.output), name=item.name)]
        count += 1
    if count:
        set_items(graph.node, [made for node in graph.node for made in new.get(id(node), [node])])
    return count


def _sizes(split: Any, shape: tuple[int | str, ...] | None, axis: int) -> list[int] | None:
    """The sizes of the parts: a list in the graph, or equal ones with a smaller last one."""
    if split is None:
        return None
    if split.ndim == 1:
        return [int(size) for size in split]
    size = None if shape is None else shape[axis]
    if not isinstance(size, int):
        return None
    part = int(split)
    return [min(part, size - start) for start in range(0, size, part)]
