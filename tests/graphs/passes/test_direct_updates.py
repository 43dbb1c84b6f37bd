"""New values of buffers as outputs instead of overwritten buffers."""

from __future__ import annotations

import numpy as np

from torch_ort_ckpt.graphs.description import ACCUMULATION_BUFFER, LAZY_RESET
from torch_ort_ckpt.graphs.passes.direct_updates import direct_updates, updated_buffers

from .small_graphs import compute, kinds, model, node, random, value


def test_outputs_take_the_place_of_overwritten_buffers() -> None:
    gradient = f"w{ACCUMULATION_BUFFER}"
    nodes = [
        node("Mul", "x x", "new"),
        node("InPlaceAccumulatorV2", "mean new yes", "written", domain="com.microsoft"),
        node("InPlaceAccumulatorV2", f"{gradient} x {LAZY_RESET}", "added", domain="com.microsoft"),
    ]
    graph = model(
        nodes,
        [value("x", [3]), value("mean", [3]), value(gradient, [3]), value(LAZY_RESET, [1], 9)],
        [value("written", [1], 9), value("added", [1], 9)],
        {"yes": np.ones(1, bool)},
    )
    assert updated_buffers(graph) == {"mean": "new"}
    assert direct_updates(graph) == 1
    assert kinds(graph) == ["Mul", "Identity", "InPlaceAccumulatorV2"]  # gradients are left to `direct_gradients`
    assert [item.name for item in graph.graph.output] == ["written", "added", "new"]
    del graph.graph.node[2], graph.graph.output[1], graph.graph.input[2:]
    x = random(3)
    written, new = compute(graph, x=x, mean=np.zeros(3, np.float32))
    assert written.all()
    np.testing.assert_allclose(new, x * x, rtol=1e-6)
