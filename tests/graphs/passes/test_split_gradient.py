"""The gradient of a Split with a part that nothing reads."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from torch_ort_ckpt.graphs.passes.split_gradient import complete_split_gradients

from .small_graphs import compute, model, node, random, value


def gradient(gradients: str, axis: int = 1) -> onnx.ModelProto:
    """Of `x`, split into 1, 2 and 3 columns of which the second has no name."""
    return model(
        [node("Split", "x sizes", "a _ c", axis=1), node("Concat", gradients, "x_grad", axis=axis)],
        [value("x", [2, 6]), *(value(name, None) for name in gradients.split())],
        [value("x_grad", None)],
        {"sizes": np.array([1, 2, 3])},
    )


@pytest.mark.parametrize("used", [["a"], ["c"], ["a", "c"]])
def test_zeros_take_the_place_of_what_is_missing(used: list[str]) -> None:
    graph = gradient(" ".join(f"{name}_grad" for name in used))
    assert complete_split_gradients(graph) == 1
    parts = {"a": random(2, 1), "c": random(2, 3)}
    (found,) = compute(graph, x=random(2, 6), **{f"{name}_grad": parts[name] for name in used})
    a, c = (parts[name] if name in used else 0 * parts[name] for name in ("a", "c"))
    np.testing.assert_array_equal(found, np.concatenate([a, np.zeros((2, 2), np.float32), c], 1))


@pytest.mark.parametrize("graph", [gradient("c_grad a_grad"), gradient("a_grad c_grad", axis=0)], ids=["order", "axis"])
def test_another_concat_of_these_values_stays(graph: onnx.ModelProto) -> None:
    before = graph.SerializeToString()
    assert complete_split_gradients(graph) == 0
    assert graph.SerializeToString() == before
