"""Split instead of SplitToSequence."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from torch_ort_ckpt.graphs.passes.sequence_splits import split_without_sequences

from .small_graphs import compute, kinds, model, node, random, value


def graph(split: object, size: int | str, taken: int = 2):
    nodes = [node("SplitToSequence", "x sizes", "parts", axis=1)]
    nodes += [node("SequenceAt", f"parts at{place}", f"y{place}") for place in range(taken)]
    made = model(nodes, [value("x", ["n", size])], [value(f"y{place}", None) for place in range(taken)])
    numbers = np.array(split)
    made.graph.initializer.append(helper.make_tensor("sizes", TensorProto.INT64, numbers.shape, numbers.reshape(-1)))
    for place in range(taken):
        index = place if place else -numbers.size  # from the end, too
        made.graph.initializer.append(helper.make_tensor(f"at{place}", TensorProto.INT64, (), [index]))
    return made


@pytest.mark.parametrize("split", [[2, 3], [1, 1, 3]])
def test_parts_of_given_sizes(split: list[int]) -> None:
    made = graph(split, 5)
    given = random(4, 5)
    expected = compute(made, x=given)
    assert split_without_sequences(made) == 1
    assert kinds(made) == ["Split", "Identity", "Identity"]
    for found, right in zip(compute(made, x=given), expected, strict=True):
        np.testing.assert_array_equal(found, right)


def test_equal_parts_need_a_known_size() -> None:
    made, unknown = graph(2, 5, taken=1), graph(2, "m", taken=1)
    for each in (made, unknown):
        each.graph.initializer[-1].int64_data[0] = 2
    given = random(4, 5)
    expected = compute(made, x=given)
    assert split_without_sequences(made) == 1
    np.testing.assert_array_equal(compute(made, x=given)[0], expected[0])
    assert expected[0].shape == (4, 1)  # the last part is smaller
    assert split_without_sequences(unknown) == 0


def test_a_sequence_that_is_used_as_a_whole_stays() -> None:
    made = graph([2, 3], 5)
    made.graph.node.append(node("ConcatFromSequence", "parts", "all", axis=1))
    made.graph.output.append(value("all", None))
    assert split_without_sequences(made) == 0
