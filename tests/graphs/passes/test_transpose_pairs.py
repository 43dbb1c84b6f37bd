"""Transposes one after another."""

from __future__ import annotations

import numpy as np

from torch_ort_ckpt.graphs.passes.transpose_pairs import join_transposes

from .small_graphs import compute, kinds, model, node, random, value


def test_two_become_one_or_none() -> None:
    nodes = [
        node("Transpose", "x", "a", perm=[1, 2, 0]),
        node("Transpose", "a", "b", perm=[2, 0, 1]),  # back again
        node("Transpose", "a", "c", perm=[1, 0, 2]),
        node("Transpose", "c", "d", perm=[0, 2, 1]),
        node("Transpose", "b", "e", perm=[2, 1, 0]),  # after an Identity
    ]
    graph = model(nodes, [value("x", [2, 3, 4])], [value(name, None) for name in "bcde"])
    expected = compute(graph, x=random(2, 3, 4))
    assert join_transposes(graph) == 3
    assert kinds(graph) == ["Transpose", "Identity", "Transpose", "Transpose", "Transpose"]
    assert [item.input[0] for item in graph.graph.node] == ["x", "x", "x", "x", "b"]
    for ours, theirs in zip(compute(graph, x=random(2, 3, 4)), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
