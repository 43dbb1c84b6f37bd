"""A reduction that keeps its axes, and a Reshape that removes them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper

from torch_ort_ckpt.graphs.passes.kept_dimensions import reduce_without_axes

from .small_graphs import compute, kinds, model, node, random, value


def _graph(axes: list[int], sizes: list[int], **settings: int):
    """ReduceSum and Reshape; the declared shape of the result is `sizes`."""
    nodes = [
        node("Constant", "", "axes", value=numpy_helper.from_array(np.array(axes))),
        node("ReduceSum", "x axes", "wide", **settings),
        node("Reshape", "wide shape", "narrow"),
        node("Neg", "narrow", "y"),
    ]
    return model(nodes, [value("x", ["n", 3, 4])], [value("y", None)], {"shape": np.array(sizes)}, inner=[value("narrow", sizes)])


@pytest.mark.parametrize("settings", [{}, {"keepdims": 1}])
@pytest.mark.parametrize(("axes", "sizes"), [([0], [3, 4]), ([0, 2], [3]), ([0, -1], [3])])
def test_one_node_does_both(axes: list[int], sizes: list[int], settings: dict[str, int]) -> None:
    graph = _graph(axes, sizes, **settings)
    (expected,) = compute(graph, x=random(5, 3, 4))
    assert reduce_without_axes(graph) == 1
    assert kinds(graph) == ["Constant", "ReduceSum", "Neg"]
    np.testing.assert_array_equal(compute(graph, x=random(5, 3, 4))[0], expected)


@pytest.mark.parametrize(("axes", "sizes", "settings"), [([0], [4, 3], {}), ([0], [12], {}), ([0], [3, 4], {"keepdims": 0})])
def test_a_reshape_to_something_else_stays(axes: list[int], sizes: list[int], settings: dict[str, int]) -> None:
    graph = _graph(axes, sizes, **settings)
    assert reduce_without_axes(graph) == 0
    assert "Reshape" in kinds(graph)


def test_a_sum_that_is_read_elsewhere_stays() -> None:
    graph = _graph([0], [3, 4])
    graph.graph.node.append(node("Neg", "wide", "z"))
    assert reduce_without_axes(graph) == 0
