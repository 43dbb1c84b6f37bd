"""Weight norm, running products and distances against autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .agreement import check

DOUBLE = torch.float64


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_weight_norm(dim):
    v = torch.randn(4, 3, 5, dtype=DOUBLE)
    g = torch.randn([] if dim == -1 else [size if axis == dim else 1 for axis, size in enumerate(v.shape)], dtype=DOUBLE)
    check(lambda v, g: torch._weight_norm(v, g, dim), [v, g], gone=["_weight_norm_interface", "_weight_norm_interface_backward"])


@settings(max_examples=8)
@given(st.integers(0, 2), st.floats(0, 0.6))
def test_cumprod_with_zeros(dim, zeros):
    batches = [[torch.randn(n, 4, 5, dtype=DOUBLE) * (torch.rand(n, 4, 5) >= zeros)] for n in (4, 3)]
    check(lambda x: torch.cumprod(x, dim), *batches, dynamic=[[0]], gone=["cumprod", "cumprod_backward"])


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_prod_with_zeros(zeros):
    batches = [[torch.randn(n, 4, dtype=DOUBLE)] for n in (2, 3)]
    for (x,) in batches:
        x[0, :zeros] = 0
    check(lambda x: torch.prod(x, 1), *batches, dynamic=[[0]], gone=["cumprod", "nonzero"])


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, float("inf")])
def test_cdist(p):
    batches = [[torch.randn(n, 4, 3, dtype=DOUBLE), torch.randn(n, 5, 3, dtype=DOUBLE)] for n in (3, 7)]
    gone = ["_cdist_forward", "_cdist_backward", "_euclidean_dist"]
    check(lambda a, b: torch.cdist(a, b, p), *batches, dynamic=[[0], [0]], gone=gone)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_equal_points_have_no_gradient(p):
    a = torch.randn(4, 3)
    check(lambda a, b: torch.cdist(a, b, p), [a, a.clone()])
