"""Padding against autograd, with dynamic sizes: a pad must not turn one into a number."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from .agreement import check, operators

GONE = [f"replication_pad{axes}d_backward" for axes in (1, 2, 3)]


@settings(max_examples=12)
@given(st.lists(st.tuples(st.integers(-2, 3), st.integers(-2, 3)), min_size=1, max_size=3), st.integers(0, 3))
def test_constant_padding_may_be_negative(pads, more):
    axes = len(pads)
    widths = [width for pair in pads for width in pair]
    batches = [[torch.randn(batch, 2, *[8 + plus] * axes, dtype=torch.float64)] for batch, plus in ((3, 0), (5, more))]
    check(lambda x: F.pad(x, widths, value=0.5), *batches, dynamic=[[0, *range(2, 2 + axes)]])


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("mode", ["replicate", "reflect", "circular"])
@pytest.mark.parametrize("widths", [[1, 2, 0, 1, 2, 1], [2, 2, 1, 0, 0, 3]])
def test_other_padding(axes, mode, widths):
    batches = [[torch.randn(batch, 2, *(5, 4, 6)[:axes])] for batch in (2, 3)]
    check(lambda x: F.pad(x, widths[: 2 * axes], mode=mode), *batches, dynamic=[[0]], gone=GONE)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_replication_of_dynamic_sizes(axes):
    batches = [[torch.randn(batch, 2, *[5 + plus] * axes)] for batch, plus in ((2, 0), (3, 2))]
    check(lambda x: F.pad(x, [1, 2] * axes, mode="replicate"), *batches, dynamic=[[0, *range(2, 2 + axes)]], gone=GONE)


def test_the_gradient_of_a_pad_is_a_slice():
    graph = check(lambda x: F.pad(x, [1, 2]), [torch.randn(2, 3)])
    pads = [node for node in graph.graph.nodes if str(node.target) == "aten.constant_pad_nd.default"]
    assert [node.args[1] for node in pads] == [[1, 2]]
    assert "slice.Tensor" in operators(graph)


def test_a_pad_of_dynamic_width():
    """The width itself depends on a dynamic size."""
    batches = [[torch.randn(2, size)] for size in (5, 6)]
    check(lambda x: F.pad(x, (0, 9 - x.shape[1])), *batches, dynamic=[[0, 1]])
