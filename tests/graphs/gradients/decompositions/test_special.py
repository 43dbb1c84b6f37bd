"""Special functions, running extremes and searches against PyTorch."""

from __future__ import annotations

import pytest
import torch

from .agreement import check

DOUBLE = torch.float64


def test_lgamma_and_digamma():
    x = torch.cat([torch.rand(200) * 20, torch.rand(200) * 0.01 + 1e-4, -torch.rand(50) * 5, torch.rand(20) * 1e4]).to(DOUBLE)
    x = x[(x - x.round()).abs() > 1e-6]
    check(torch.lgamma, [x], gone=["lgamma", "digamma"], tolerance=1e-9)
    check(torch.lgamma, [torch.rand(50) * 5 + 0.1], gone=["lgamma", "digamma"], tolerance=1e-4)


def test_erfinv():
    x = torch.cat([torch.linspace(-0.9999, 0.9999, 101), torch.tensor([0.0, 1e-6])]).to(DOUBLE)
    check(torch.erfinv, [x], gone=["erfinv"], tolerance=1e-9)
    check(torch.erfinv, [torch.linspace(-0.99, 0.99, 51)], gone=["erfinv"], tolerance=1e-4)


def test_erfinv_at_its_ends():
    from torch_ort_ckpt.graphs.gradients.decompositions.special import erfinv

    x = torch.tensor([-1.0, 1.0, 1.5, -2.0])
    torch.testing.assert_close(erfinv(x), torch.erfinv(x), equal_nan=True)


@pytest.mark.parametrize("function", [torch.cummax, torch.cummin])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cummax_and_cummin_with_equal_elements(function, dim):
    batches = [[torch.randint(0, 4, (n, 5, 3)).to(DOUBLE)] for n in (3, 4)]
    check(lambda x: function(x, dim).values, *batches, dynamic=[[0]], gone=["cummax", "cummin"])


def test_logcumsumexp():
    batches = [[torch.randn(n, 5, dtype=DOUBLE)] for n in (3, 4)]
    check(lambda x: torch.logcumsumexp(x, 1), *batches, dynamic=[[0]], gone=["logcumsumexp"])


@pytest.mark.parametrize("right", [True, False])
def test_searchsorted(right):
    edges = torch.tensor([[-1.0, 0.0, 0.0, 2.0], [0.0, 1.0, 2.0, 3.0]])
    x = torch.tensor([[0.0, 0.5, -2.0], [3.0, 1.0, 9.0]])
    check(lambda x, e: x * torch.searchsorted(e.detach(), x.detach(), right=right), [x, edges], gone=["searchsorted"])
    check(lambda x, e: x * torch.searchsorted(e.detach(), x.detach(), right=right), [x, edges[0]], gone=["searchsorted"])


def test_random_slopes_are_their_mean_outside_of_training():
    check(lambda x: torch.nn.functional.rrelu(x, training=False), [torch.randn(3, 4)], gone=["rrelu_with_noise"])
