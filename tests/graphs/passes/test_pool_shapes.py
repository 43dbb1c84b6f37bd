"""Gradients of pools without a fixed shape."""

from __future__ import annotations

import pytest

from torch_ort_ckpt.graphs.passes.pool_shapes import infer_pool_shapes
from torch_ort_ckpt.graphs.shapes import shapes

from .small_graphs import model, node, value


@pytest.mark.parametrize("kind", ["AveragePool", "MaxPool"])
def test_the_shape_is_that_of_the_pool_s_input(kind: str) -> None:
    nodes = [
        node("Gelu", "x", "a", domain="com.microsoft"),  # unknown to shape inference, but keeps the shape
        node(kind, "a", "y", kernel_shape=[2, 2]),
        node(f"{kind}Grad", "y_grad", "a_grad", domain="com.microsoft", kernel_shape=[2, 2]),
    ]
    graph = model(
        nodes,
        [value("x", ["batch", 3, 8, 6]), value("y_grad", None)],
        [value("a_grad", None)],
        inner=[value("a_grad", ["batch", 3, "h", 6])],
    )
    del graph.graph.output[:]
    assert infer_pool_shapes(graph) == 1
    assert shapes(graph)["a_grad"] == (None, 3, 8, 6)
    assert infer_pool_shapes(graph) == 0
