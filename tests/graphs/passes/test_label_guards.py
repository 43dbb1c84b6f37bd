"""Labels that the graph computes: reported, and replaced by 0, where they are out of range."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from torch_ort_ckpt.graphs.passes.label_guards import guard_labels, guard_outputs

from .small_graphs import compute, model, node, random, value


def loss(**settings: Any) -> onnx.ModelProto:
    return model(
        [node("Identity", "labels", "shifted"), node("SoftmaxCrossEntropyLoss", "scores shifted", "loss", reduction="sum", **settings)],
        [value("scores", [None, None]), value("labels", [None], TensorProto.INT64)],
        [value("loss", [])],
    )


@pytest.mark.parametrize("ignored", [None, -100])
def test_labels_out_of_range(ignored: int | None) -> None:
    graph = loss(**({} if ignored is None else {"ignore_index": ignored}))
    assert guard_labels(graph, ["loss"]) == 1
    assert [item.name for item in graph.graph.output] == ["loss", *guard_outputs(["loss"])]
    labels = np.array([0, 2, 3, -1, -100, 2**40])
    found, given, right = compute(graph, scores=random(6, 3), labels=labels)
    assert np.isfinite(found)
    np.testing.assert_array_equal(given, labels)
    np.testing.assert_array_equal(right, [True, True, False, False, ignored is not None, False])


def test_the_gradient_reads_the_same_labels() -> None:
    graph = loss()
    graph.graph.node.append(node("SoftmaxCrossEntropyLossGrad", "dy log_prob shifted", "d_scores", domain="com.microsoft"))
    guard_labels(graph, ["loss"])
    *_, forward, backward = graph.graph.node
    assert forward.input[1] == backward.input[2] != "shifted"
