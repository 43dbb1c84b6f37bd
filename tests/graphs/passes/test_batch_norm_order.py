"""A BatchNorm used twice: the second use continues from the statistics of the first.

`tests/engines/test_batch_norm_order.py` trains such modules.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx
import pytest

from torch_ort_ckpt.graphs.passes.batch_norm_order import chain_statistics

from .small_graphs import model, node, value

SETTINGS = {"training_mode": 1}


def training(*uses: tuple[str, str]) -> onnx.ModelProto:
    """A graph with a BatchNorm for every pair of what it reads and its result, all with the same statistics."""
    nodes = [node("BatchNormalization", f"{x} scale scale mean variance", y, **SETTINGS) for x, y in uses]
    nodes.append(node("Sum", " ".join(y for _, y in uses), "total"))
    return model(
        nodes,
        [value("a", [2, 3]), value("b", [2, 3]), value("mean", [3]), value("variance", [3])],
        [value("total", [2, 3])],
        {"scale": np.ones(3, np.float32)},
    )


def statistics(graph: onnx.ModelProto) -> dict[str, str]:
    """Result of each BatchNorm -> the running mean that it reads."""
    return {item.output[0]: item.input[3] for item in graph.graph.node if item.op_type == "BatchNormalization"}


def test_the_eval_graph_has_the_order() -> None:
    graph, evaluation = training(("a", "bn"), ("b", "bn_1")), training(("b", "bn_1"), ("a", "bn"))
    assert chain_statistics(graph, evaluation) == 2
    assert statistics(graph) == {"bn_1": "mean", "bn": "bn_1.statistics1"}
    assert [item.output[0] for item in graph.graph.node] == ["bn_1", "bn", "total"]  # sorted: each after what it reads
    onnx.checker.check_model(graph)


def test_without_it_the_names_have(caplog: pytest.LogCaptureFixture) -> None:
    graph = training(("a", "bn_10"), ("b", "bn_9"), ("a", "bn"))
    with caplog.at_level(logging.WARNING):
        assert chain_statistics(graph, None) == 3
    assert "mean: used more than once" in caplog.text
    assert statistics(graph) == {"bn": "mean", "bn_9": "bn.statistics1", "bn_10": "bn_9.statistics1"}


def test_names_against_the_flow_of_data() -> None:
    """`bn` reads the result of `bn_1`, so it can't be the first."""
    graph = training(("a", "bn_1"), ("bn_1", "bn"))
    chain_statistics(graph, None)
    assert statistics(graph) == {"bn_1": "mean", "bn": "bn_1.statistics1"}


def test_a_single_use_stays() -> None:
    graph = training(("a", "bn"))
    before = graph.SerializeToString()
    assert chain_statistics(graph, None) == 0
    assert graph.SerializeToString() == before
