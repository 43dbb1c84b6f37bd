"""Symbolic dimensions replaced by sizes."""

from __future__ import annotations

from torch_ort_ckpt.graphs.passes.dimensions import fix_dimensions
from torch_ort_ckpt.graphs.shapes import shapes

from .small_graphs import model, node, value


def test_inputs_inner_values_and_outputs() -> None:
    nodes = [node("Relu", "x", "a"), node("Abs", "a", "y")]
    graph = model(nodes, [value("x", ["batch", "height"])], [value("y", ["batch", "height"])], inner=[value("a", ["batch", "height"])])
    assert fix_dimensions(graph, {"batch": 4, "width": 7}) == 3
    assert shapes(graph) == {"x": (4, None), "a": (4, None), "y": (4, None)}
    assert fix_dimensions(graph, {}) == 0
