"""The part of a graph that some of its values need."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import torch_ort_ckpt as toc
from torch_ort_ckpt.graphs.passes.keep_outputs import keep_outputs

from .small_graphs import compute, kinds, model, node, random, value


def graph_with_loss() -> onnx.ModelProto:
    return model(
        [
            node("Relu", "x", "hidden"),
            node("Mul", "hidden w", "scores"),
            node("Sub", "scores labels", "loss"),
            node("Abs", "offset", "other"),
        ],
        [value("x", [3]), value("labels", [3])],
        [value("loss", [3])],
        {"w": np.full(3, 2, np.float32), "offset": np.ones(1, np.float32)},
    )


def test_nodes_inputs_and_constants_that_are_not_needed_disappear() -> None:
    graph = graph_with_loss()
    assert keep_outputs(graph, ["scores", "hidden"]) == 2
    assert kinds(graph) == ["Relu", "Mul"]
    assert [item.name for item in graph.graph.input] == ["x"]
    assert [tensor.name for tensor in graph.graph.initializer] == ["w"]
    onnx.checker.check_model(graph, full_check=True)
    x = random(3)
    scores, hidden = compute(graph, x=x)
    np.testing.assert_array_equal(hidden, np.maximum(x, 0))
    np.testing.assert_array_equal(scores, 2 * hidden)


def test_what_a_branch_reads_is_needed() -> None:
    branches = {
        f"{name}_branch": helper.make_graph([node("Identity", source, "result")], name, [], [value("result", [3])])
        for name, source in (("then", "hidden"), ("else", "w"))
    }
    graph = graph_with_loss()
    graph.graph.input.append(value("flag", [], TensorProto.BOOL))
    graph.graph.node.append(node("If", "flag", "chosen", **branches))
    keep_outputs(graph, ["chosen"])
    assert kinds(graph) == ["Relu", "If"]
    assert [item.name for item in graph.graph.input] == ["x", "flag"]
    assert [tensor.name for tensor in graph.graph.initializer] == ["w"]
    x = random(3)
    np.testing.assert_array_equal(compute(graph, x=x, flag=np.array(True))[0], np.maximum(x, 0))


@pytest.mark.parametrize("name", ["nothing", "x", "w"])
def test_a_value_that_no_node_computes(name: str) -> None:
    with pytest.raises(toc.CheckpointError, match=f"computes no '{name}'.*loss"):
        keep_outputs(graph_with_loss(), [name])
