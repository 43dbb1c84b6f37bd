"""Gradients as outputs instead of accumulation buffers."""

from __future__ import annotations

import numpy as np

from torch_ort_ckpt.graphs.description import ACCUMULATION_BUFFER, ACCUMULATION_OUTPUT, LAZY_RESET
from torch_ort_ckpt.graphs.passes.direct_gradients import direct_gradient_names, direct_gradients

from .small_graphs import compute, kinds, model, node, random, value


def test_outputs_take_the_place_of_buffers() -> None:
    """`u` and `v` have the same gradient, and that of `c` is a constant."""
    gradients = {"u": "d", "v": "d", "c": "one"}
    nodes = [node("Mul", "x x", "d"), node("ReduceSum", "x", "loss", keepdims=0)]
    for name, gradient in gradients.items():
        inputs = f"{name}_grad.accumulation.buffer {gradient} {LAZY_RESET}"
        nodes.append(node("InPlaceAccumulatorV2", inputs, f"{name}{ACCUMULATION_OUTPUT}", domain="com.microsoft"))
    graph = model(
        nodes,
        [value("x", [3]), *(value(name + ACCUMULATION_BUFFER, [3]) for name in gradients), value(LAZY_RESET, [1], 9)],
        [value("loss", []), *(value(name + ACCUMULATION_OUTPUT, [1], 9) for name in gradients)],
        {"one": np.ones(3, np.float32)},
    )
    names = direct_gradient_names(graph)
    assert direct_gradients(graph) == 3
    assert "InPlaceAccumulatorV2" not in kinds(graph)
    assert [item.name for item in graph.graph.input] == ["x"]
    assert [item.name for item in graph.graph.output] == ["loss", *names.values()]
    assert names["u"] == "d"
    x = random(3)
    _, u, v, c = compute(graph, x=x)
    np.testing.assert_allclose(np.stack([u, v, c]), np.stack([x * x, x * x, np.ones(3)]), rtol=1e-6)
