"""Transposes whose axes count from the end.

PyTorch's older exporter keeps the negative axes of `permute(0, -1, 1)`. ONNX does not allow them there: shape inference fails.
"""

from __future__ import annotations

import onnx

from ..description import all_nodes


def count_axes_from_front(model: onnx.ModelProto) -> int:
    count = 0
    for node in all_nodes(model.graph):
        for item in node.attribute:
            if node.op_type == "Transpose" and item.name == "perm" and any(axis < 0 for axis in item.ints):
                item.ints[:] = [axis + len(item.ints) if axis < 0 else axis for axis in item.ints]
                count += 1
    return count
