"""CastLike becomes Cast."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from torch_ort_ckpt.graphs.passes.cast_like import replace_cast_like

from .small_graphs import compute, kinds, model, node, value


def test_the_type_of_the_second_input_is_taken() -> None:
    graph = model(
        [node("Abs", "like", "positive"), node("CastLike", "x positive", "y")],
        [value("x", [2], TensorProto.INT64), value("like", [1], TensorProto.DOUBLE)],
        [value("y", [2], TensorProto.DOUBLE)],
    )
    assert replace_cast_like(graph) == 1
    assert kinds(graph) == ["Abs", "Cast"]
    assert list(graph.graph.node[1].input) == ["x"]
    (y,) = compute(graph, x=np.array([1, 2]), like=np.ones(1))
    assert y.dtype == np.float64
    np.testing.assert_array_equal(y, [1, 2])


def test_a_type_that_is_not_known_leaves_the_node() -> None:
    graph = model(
        [node("Unheard", "x", "like", domain="com.microsoft"), node("CastLike", "x like", "y")], [value("x", [2])], [value("y", None, 0)]
    )
    assert replace_cast_like(graph) == 0
    assert kinds(graph)[1] == "CastLike"
