"""Operators that choose elements, against autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ort_ckpt.graphs.gradients.decompositions import copying, indexing

from .agreement import check, trace

DOUBLE = torch.float64


@settings(max_examples=10)
@given(st.integers(-3, 3), st.permutations([0, 1, 2]).map(lambda axes: axes[:2]))
def test_diagonal(offset, axes):
    first, second = axes
    batches = [[torch.randn(n, 4, 5, dtype=DOUBLE)] for n in (4, 6)]
    check(lambda x: torch.diagonal(x, offset, first, second - 3), *batches, dynamic=[[0]], gone=["diagonal", "diagonal_backward"])


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("dim", [1, -1])
def test_median_and_kthvalue(dim, keepdim):
    batches = [[torch.randn(n, 4, 5)] for n in (2, 3)]
    check(lambda x: torch.median(x, dim, keepdim).values, *batches, dynamic=[[0]], gone=["median"])
    check(lambda x: torch.kthvalue(x, 3, dim, keepdim).values, *batches, dynamic=[[0]], gone=["kthvalue"])


def test_median_along_a_dynamic_axis_and_of_all():
    batches = [[torch.randn(n, 4)] for n in (5, 8)]
    check(lambda x: torch.median(x, 0).values, *batches, dynamic=[[0]], gone=["median"])
    check(lambda x: torch.median(x), *batches, dynamic=[[0]], gone=["median"])


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=3), st.integers(0, 3))
def test_as_strided(axes, offset):
    """Elements may be taken more than once: their gradients add up."""
    size, stride = [axis[0] for axis in axes], [axis[1] for axis in axes]
    check(lambda x: torch.as_strided(x, size, stride, offset) * x.sum(), [torch.randn(4, 4, dtype=DOUBLE)], gone=["as_strided"])


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 3))
def test_as_strided_scatter(rows, columns, offset):
    x, src = torch.randn(4, 4), torch.randn(rows, columns)
    arguments = (src, [rows, columns], [4, 1], offset)
    torch.testing.assert_close(indexing.as_strided_scatter(x, *arguments), torch.as_strided_scatter(x, *arguments))


def test_memory_in_another_order_is_left_alone():
    assert indexing.as_strided(torch.randn(3, 4).t(), [2], [1]) is NotImplemented


def test_copy_broadcasts_and_converts():
    x, src = torch.zeros(3, 4), torch.arange(4)
    torch.testing.assert_close(copying.copy(x, src), torch.ops.aten.copy(x, src))


def test_an_empty_tensor_has_the_asked_shape():
    result = copying.empty_permuted([2, 3, 4], [0, 2, 1], dtype=DOUBLE)
    assert (result.shape, result.dtype) == (torch.Size([2, 3, 4]), DOUBLE)


def test_eye():
    check(lambda x: x @ torch.eye(4) + torch.eye(3, 4), [torch.randn(3, 4)], gone=["eye"])
    assert indexing.eye(3).dtype == torch.float32
    assert torch.equal(indexing.eye_of(2, 3, dtype=torch.int64), torch.eye(2, 3, dtype=torch.int64))


def test_eye_compares_no_bytes():
    graph = trace(lambda x: x @ torch.eye(4), [torch.randn(3, 4)])
    assert all(node.meta["val"].dtype != torch.uint8 for node in graph.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor))
