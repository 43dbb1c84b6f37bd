"""Nodes whose results nobody reads: what other rewrites leave behind, and helper nodes of PyTorch's exporter."""

from __future__ import annotations

import onnx

from ..description import reads
from .rewriting import set_items


def remove_unused_nodes(model: onnx.ModelProto) -> int:
    graph = model.graph
    wanted = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(reads(node))
    count = len(graph.node) - len(kept)
    if count:
        set_items(graph.node, reversed(kept))
        set_items(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in wanted])
    return count
