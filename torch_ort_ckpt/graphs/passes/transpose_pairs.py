"""A Transpose of a Transpose: PyTorch transposes the gradient of a linear layer's weight twice, and its weight once for each direction.

ONNX Runtime folds one of them into the product before it, after which the other has none left to cancel out with.
"""

from __future__ import annotations

import onnx

from ..description import attributes


def join_transposes(model: onnx.ModelProto) -> int:
    """The second takes the place of both; if together they move nothing, it becomes an Identity. The first stays for its other readers."""
    before: dict[str, tuple[str, list[int]]] = {}
    count = 0
    for node in model.graph.node:
        axes = list(attributes(node).get("perm", ())) if node.op_type == "Transpose" else []
        if not axes:
            continue
        if node.input[0] in before:
            source, first = before[node.input[0]]
            axes = [first[axis] for axis in axes]
            node.input[0] = source
            del node.attribute[:]
            if axes == sorted(axes):
                node.op_type = "Identity"
            else:
                node.attribute.append(onnx.helper.make_attribute("perm", axes))
            count += 1
        if node.op_type == "Transpose":
            before[node.output[0]] = node.input[0], axes
    return count
