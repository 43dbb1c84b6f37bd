"""The gradient of a Where that broadcasts an operand."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from torch_ort_ckpt.graphs.passes.where_gradient import sum_where_gradients

from .small_graphs import compute_by_ort, kinds, model, node, random, value


def gradient(shape: list[int], opset: int = 17) -> onnx.ModelProto:
    """Of `w` in `y = Where(mask, w, x)`, as ORT's gradient builder writes it: with the shape of `y`."""
    return model(
        [node("Where", "mask w x", "y"), node("Where", "mask y_grad ZeroConstant", "w_grad")],
        [value("mask", [2, 3], TensorProto.BOOL), value("w", shape), value("x", [2, 3]), value("y_grad", [2, 3])],
        [value("w_grad", None)],
        {"ZeroConstant": np.float32(0)},
        inner=[value("y", [2, 3]), value("w_grad", [2, 3])],
        opset=opset,
    )


@pytest.mark.ort
@pytest.mark.parametrize("opset", [12, 17])
@pytest.mark.parametrize("shape", [[3], [2, 1], [1, 1], []])
def test_it_is_summed_to_the_operand_s_shape(shape: list[int], opset: int) -> None:
    graph = gradient(shape, opset)
    assert sum_where_gradients(graph) == 1
    assert "w_grad" not in {item.name for item in graph.graph.value_info}  # the old shape
    mask, dy = np.array([[True, False, True], [True, True, False]]), random(2, 3)
    (found,) = compute_by_ort(graph, mask=mask, w=random(*shape), x=random(2, 3), y_grad=dy)
    expected = np.where(mask, dy, 0)
    axes = tuple(axis for axis, size in enumerate([1] * (2 - len(shape)) + shape) if size == 1)
    np.testing.assert_allclose(found, expected.sum(axes, keepdims=True).reshape(shape), rtol=1e-6)


def test_an_operand_of_the_result_s_shape_stays() -> None:
    graph = gradient([2, 3])
    assert sum_where_gradients(graph) == 0
    assert kinds(graph) == ["Where", "Where"]
