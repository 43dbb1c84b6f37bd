"""The indices of a MaxPool that nobody reads. ONNX Runtime computes them if they are named, in ten times the time of the maxima."""

from __future__ import annotations

import onnx

from ..description import all_nodes, reads


def drop_unused_indices(model: onnx.ModelProto) -> int:
    graph = model.graph
    used = {name for node in all_nodes(graph) for name in reads(node)} | {value.name for value in graph.output}
    count = 0
    for node in all_nodes(graph):
        if node.op_type == "MaxPool" and len(node.output) > 1 and node.output[1] not in used:
            del node.output[1:]
            count += 1
    return count
