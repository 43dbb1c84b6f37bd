"""A Transpose that moves no axis. `tests/engines/test_kernels.py` shows what ORT makes of it before a Gemm."""

from __future__ import annotations

from torch_ort_ckpt.graphs.passes.identity_transpose import remove_identity_transposes

from .small_graphs import kinds, model, node, value


def test_only_a_transpose_that_moves_nothing_becomes_an_identity() -> None:
    nodes = [node("Transpose", "x", "a", perm=[0, 1]), node("Transpose", "a", "b", perm=[1, 0]), node("Transpose", "b", "y")]
    graph = model(nodes, [value("x", [2, 3])], [value("y", None)])
    assert remove_identity_transposes(graph) == 1
    assert kinds(graph) == ["Identity", "Transpose", "Transpose"]  # without `perm` the axes are reversed
    assert not graph.graph.node[0].attribute
