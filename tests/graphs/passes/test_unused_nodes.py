"""Nodes whose results nobody reads."""

from __future__ import annotations

import numpy as np

from torch_ort_ckpt.graphs.passes.unused_nodes import remove_unused_nodes

from .small_graphs import kinds, model, node, value


def test_they_go_with_what_only_they_read() -> None:
    nodes = [node("Neg", "x", "a"), node("Add", "a one", "b"), node("Mul", "b b", "c"), node("Mul", "a two", "y")]
    graph = model(nodes, [value("x", [2])], [value("y", [2])], {"one": np.ones(1, np.float32), "two": np.ones(1, np.float32)})
    assert remove_unused_nodes(graph) == 2
    assert kinds(graph) == ["Neg", "Mul"]
    assert [tensor.name for tensor in graph.graph.initializer] == ["two"]
    assert remove_unused_nodes(graph) == 0
