"""A Transpose with negative axes."""

from __future__ import annotations

import numpy as np

from torch_ort_ckpt.graphs.passes.transpose_axes import count_axes_from_front

from .small_graphs import compute, model, node, random, value


def test_negative_axes_are_counted_from_the_front() -> None:
    graph = model([node("Transpose", "x", "y", perm=[0, -1, 1])], [value("x", [2, 3, 4])], [value("y", None)])
    assert count_axes_from_front(graph) == 1
    assert list(graph.graph.node[0].attribute[0].ints) == [0, 2, 1]
    x = random(2, 3, 4)
    np.testing.assert_array_equal(compute(graph, x=x)[0], x.transpose(0, 2, 1))


def test_other_axes_stay() -> None:
    graph = model([node("Transpose", "x", "y", perm=[0, 2, 1])], [value("x", [2, 3, 4])], [value("y", None)])
    assert count_axes_from_front(graph) == 0
    assert list(graph.graph.node[0].attribute[0].ints) == [0, 2, 1]
