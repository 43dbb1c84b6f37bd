"""Nodes without the outputs that ORT's gradient builder reads."""

from __future__ import annotations

import pytest

from torch_ort_ckpt.graphs.passes.optional_outputs import complete_outputs

from .small_graphs import model, node, value

CASES = {
    "LayerNormalization": ("x w", "y", ["y", "y.mean", "y.inv_std_dev"]),
    "LayerNormalization with a mean": ("x w", "y m", ["y", "m", "y.inv_std_dev"]),
    "Dropout": ("x", "y", ["y", "y.mask"]),
    "SoftmaxCrossEntropyLoss": ("x labels", "y", ["y", "y.log_prob"]),
}


@pytest.mark.parametrize("name", CASES)
def test_missing_outputs_are_added(name: str) -> None:
    inputs, outputs, expected = CASES[name]
    graph = model([node(name.split()[0], inputs, outputs)], [value("x", [2, 3])], [value("y", None)])
    assert complete_outputs(graph) == 1
    assert list(graph.graph.node[0].output) == expected
    assert complete_outputs(graph) == 0


def test_other_operators_stay() -> None:
    graph = model([node("Relu", "x", "y")], [value("x", [2])], [value("y", [2])])
    assert complete_outputs(graph) == 0
    assert list(graph.graph.node[0].output) == ["y"]
