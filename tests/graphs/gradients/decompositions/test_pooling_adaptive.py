"""Pooling to a given size against autograd, with sizes that divide and sizes that do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from .agreement import check

AVERAGES = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
MAXIMA = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
OPERATORS = ["_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward",
             "adaptive_max_pool2d", "adaptive_max_pool2d_backward", "adaptive_max_pool3d", "adaptive_max_pool3d_backward"]  # fmt: skip

sizes = st.lists(st.tuples(st.integers(1, 5), st.integers(2, 9)), min_size=1, max_size=3)


@settings(max_examples=12)
@given(sizes, st.booleans())
def test_at_two_batch_sizes(pairs, maximum):
    out, shape = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    function = (MAXIMA if maximum else AVERAGES)[len(pairs) - 1]
    batches = [[torch.randn(batch, 2, *shape, dtype=torch.float64)] for batch in (2, 5)]
    check(lambda x: function(x, out), *batches, dynamic=[[0]], gone=OPERATORS)


@settings(max_examples=8)
@given(sizes, st.integers(0, 4))
def test_averages_of_images_of_dynamic_size(pairs, more):
    out, shape = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    function = AVERAGES[len(pairs) - 1]
    batches = [[torch.randn(batch, 2, *(size + plus for size in shape))] for batch, plus in ((2, 0), (3, more))]
    check(lambda x: function(x, out), *batches, dynamic=[[0, *range(2, 2 + len(pairs))]], gone=OPERATORS)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_one_element_is_a_mean(axes):
    batches = [[torch.randn(batch, 2, *(5, 4, 6)[:axes])] for batch in (2, 3)]
    graph = check(lambda x: AVERAGES[axes - 1](x, 1), *batches, dynamic=[[0]], gone=OPERATORS)
    assert "matmul" not in graph.code
    assert "mean" in graph.code


def test_channels_last():
    """PyTorch writes as_strided for images in this order, which ONNX does not have."""
    batches = [[torch.randn(batch, 3, 8, 6).to(memory_format=torch.channels_last)] for batch in (2, 5)]
    check(lambda x: F.adaptive_avg_pool2d(x, (2, 3)), *batches, dynamic=[[0]], gone=[*OPERATORS, "as_strided"])


def test_the_first_of_equal_maxima_gets_the_gradient():
    check(lambda x: F.adaptive_max_pool2d(x, (2, 2)), [torch.ones(1, 1, 5, 5)])
