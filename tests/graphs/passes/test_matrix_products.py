"""Products of two matrices as Gemm."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from torch_ort_ckpt.graphs.passes.matrix_products import use_gemm
from torch_ort_ckpt.graphs.passes.unused_nodes import remove_unused_nodes

from .small_graphs import compute, kinds, model, node, random, value


def test_transposes_and_a_sum_become_part_of_it() -> None:
    nodes = [
        node("Transpose", "x", "across", perm=[1, 0]),
        node("MatMul", "across w", "product"),
        node("Add", "rest product", "y"),
    ]
    inner = [value("across", [3, "n"]), value("product", [3, 2])]
    inputs = [value("x", ["n", 3]), value("w", ["n", 2]), value("rest", [3, 2])]
    graph = model(nodes, inputs, [value("y", [3, 2])], inner=inner)
    feeds = {"x": random(5, 3), "w": random(5, 2, seed=1), "rest": random(3, 2, seed=2)}
    (expected,) = compute(graph, **feeds)
    assert use_gemm(graph) == 1
    remove_unused_nodes(graph)
    assert kinds(graph) == ["Gemm"]
    np.testing.assert_allclose(compute(graph, **feeds)[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("rest", "kind", "shape"), [([1, 2], TensorProto.FLOAT, [3, "n"]), ([3, 2], TensorProto.INT32, [3, "n"]), ([3, 2], 1, [4, 3, "n"])]
)
def test_sums_that_broadcast_other_types_and_more_axes_stay(rest: list[int], kind: int, shape: list[int | str]) -> None:
    nodes = [node("MatMul", "x w", "product"), node("Add", "product rest", "y")]
    inputs = [value("x", shape, kind), value("w", ["n", 2], kind), value("rest", rest, kind)]
    graph = model(nodes, inputs, [value("y", None, kind)], inner=[value("product", [*shape[:-1], 2], kind)])
    use_gemm(graph)
    assert "Add" in kinds(graph)


def test_a_product_that_is_read_elsewhere_is_not_merged_with_a_sum() -> None:
    nodes = [node("MatMul", "x w", "product"), node("Add", "product rest", "y"), node("Neg", "product", "z")]
    inputs = [value("x", ["n", 3]), value("w", [3, 2]), value("rest", ["n", 2])]
    graph = model(nodes, inputs, [value("y", None), value("z", None)], inner=[value("product", ["n", 2])])
    assert use_gemm(graph) == 1
    assert kinds(graph) == ["Gemm", "Add", "Neg"]
