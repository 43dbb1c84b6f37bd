"""The padding row of an embedding takes no gradient from lookups."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from torch_ort_ckpt.graphs.description import padding_row
from torch_ort_ckpt.graphs.passes.padding_gradient import stop_padding_gradients

from .small_graphs import compute_by_ort, kinds, model, node, random, value


def lookup(opset: int = 17) -> onnx.ModelProto:
    return model(
        [
            node("Gather", "w tokens", "y"),
            node("GatherGrad", "shape tokens y_grad", "w_grad", domain="com.microsoft", axis=0),
        ],
        [value("w", [5, 3]), value("tokens", [2, 2], TensorProto.INT64), value("y_grad", [2, 2, 3])],
        [value("y", [2, 2, 3]), value("w_grad", None)],
        {"shape": np.array([5, 3])},
        opset=opset,
    )


@pytest.mark.ort
@pytest.mark.parametrize("opset", [12, 17])
def test_the_row_s_gradient_is_zero(opset: int) -> None:
    graph = lookup(opset)
    assert stop_padding_gradients(graph, {"w": 1}) == 1
    tokens, dy = np.array([[1, 4], [4, 1]]), random(2, 2, 3)
    _, found = compute_by_ort(graph, w=random(5, 3), tokens=tokens, y_grad=dy)
    expected = np.zeros((5, 3), np.float32)
    expected[4] = dy[0, 1] + dy[1, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_forward_node_records_the_row() -> None:
    graph = lookup()
    assert padding_row(graph.graph.node[0]) is None
    stop_padding_gradients(graph, {"w": 1})
    assert padding_row(graph.graph.node[0]) == 1


def test_other_weights_stay() -> None:
    graph = lookup()
    assert stop_padding_gradients(graph, {"other": 1}) == 0
    assert kinds(graph) == ["Gather", "GatherGrad"]
