"""Accumulation buffers with a wrong shape."""

from __future__ import annotations

from torch_ort_ckpt.graphs.passes.gradient_buffers import shape_gradient_buffers
from torch_ort_ckpt.graphs.shapes import shapes

from .small_graphs import model, value


def test_a_buffer_gets_the_shape_of_its_parameter() -> None:
    inputs = [value("w", [3, 4]), value("b", [4]), value("w_grad.accumulation.buffer", [2, 4]), value("b_grad.accumulation.buffer", [4])]
    graph = model([], inputs, [])
    assert shape_gradient_buffers(graph) == 1
    assert shapes(graph)["w_grad.accumulation.buffer"] == (3, 4)
    assert shape_gradient_buffers(graph) == 0
