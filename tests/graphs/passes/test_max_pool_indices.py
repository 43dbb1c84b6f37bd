"""Indices of a MaxPool that nobody reads."""

from __future__ import annotations

from onnx import TensorProto

from torch_ort_ckpt.graphs.passes.max_pool_indices import drop_unused_indices

from .small_graphs import model, node, value


def test_only_indices_that_nobody_reads_are_dropped() -> None:
    settings = {"kernel_shape": [2, 2]}
    nodes = [node("MaxPool", "x", "a i", **settings), node("MaxPool", "a", "b j", **settings), node("MaxPool", "b", "y k", **settings)]
    nodes.append(node("Cast", "j", "c", to=TensorProto.FLOAT))
    graph = model(nodes, [value("x", [1, 1, 8, 8])], [value("y", None), value("k", None, TensorProto.INT64), value("c", None)])
    assert drop_unused_indices(graph) == 1
    assert [list(item.output) for item in graph.graph.node[:3]] == [["a"], ["b", "j"], ["y", "k"]]
