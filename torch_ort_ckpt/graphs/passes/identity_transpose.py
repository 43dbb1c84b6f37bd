"""Transposes that move no axis, such as `permute(0, 1)`.

ORT's graph optimizer assumes that any Transpose before a Gemm swaps rows and columns, and folds it into the Gemm: wrong results.
"""

from __future__ import annotations

import onnx

from ..description import all_nodes, attributes


def remove_identity_transposes(model: onnx.ModelProto) -> int:
    count = 0
    for node in all_nodes(model.graph):
        perm = list(attributes(node).get("perm", ())) if node.op_type == "Transpose" else []
        if perm and perm == sorted(perm):
            node.op_type = "Identity"
            del node.attribute[:]
            count += 1
    return count
