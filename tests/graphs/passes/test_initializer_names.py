"""Weights get the module's names."""

from __future__ import annotations

import numpy as np

from torch_ort_ckpt.graphs.passes.initializer_names import rename_initializers

from .small_graphs import compute, model, node, random, value


def test_a_weight_is_renamed_wherever_it_is_read() -> None:
    weight, x = random(3, seed=1), random(3)
    graph = model([node("Mul", "x head", "a"), node("Add", "a head", "y")], [value("x", [3])], [value("y", [3])], {"head": weight})
    assert rename_initializers(graph, {"head": "embedding", "other": "unused"}) == 3
    assert [tensor.name for tensor in graph.graph.initializer] == ["embedding"]
    np.testing.assert_allclose(compute(graph, x=x)[0], x * weight + weight, rtol=1e-6)
    assert rename_initializers(graph, {}) == 0
