"""Losses that PyTorch decomposes wrongly or that branch on values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from torch_ort_ckpt.graphs.gradients.decompositions import while_exporting
from torch_ort_ckpt.graphs.gradients.decompositions.losses import gaussian_nll_loss

from .agreement import check

DOUBLE = torch.float64


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_multilabel_margin_loss(reduction):
    """Labels end at the first -1; what comes after it does not count."""
    labels = torch.tensor([[3, 0, -1, 1], [-1, 0, 1, 2], [0, 1, 2, 3]])
    batches = [[torch.randn(3 * n, 4, dtype=DOUBLE), labels.repeat(n, 1)] for n in (1, 2)]
    check(lambda x, y: F.multilabel_margin_loss(x, y, reduction=reduction), *batches, dynamic=[[0], [0]])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("shape", [(5, 4), (5, 1), (5,)])
def test_gaussian_nll_loss(shape, full, reduction):
    x, target = (torch.randn(5, 4, dtype=DOUBLE) for _ in range(2))
    variance = torch.rand(shape, dtype=DOUBLE)
    variance.view(-1)[0] = 0  # below eps
    results = []
    for function in (F.gaussian_nll_loss, gaussian_nll_loss):
        leaves = [value.clone().requires_grad_() for value in (x, target, variance)]
        loss = function(*leaves, full=full, reduction=reduction)
        results.append([loss, *torch.autograd.grad(loss.sum(), leaves)])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gaussian_nll_loss_can_be_exported():
    class Loss(torch.nn.Module):
        def forward(self, x, y, v):
            return torch.nn.GaussianNLLLoss()(x, y, v)

    batch = torch.randn(3, 4), torch.randn(3, 4), torch.rand(3, 4)
    with while_exporting():
        program = torch.export.export(Loss(), batch)
    torch.testing.assert_close(program.module()(*batch), F.gaussian_nll_loss(*batch))


def test_a_batch_of_determinants_stays_dynamic_while_exporting():
    class Det(torch.nn.Module):
        def forward(self, x):
            return torch.linalg.det(x)

    with while_exporting():
        program = torch.export.export(Det(), (torch.randn(4, 3, 3),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    x = torch.randn(7, 3, 3)
    torch.testing.assert_close(program.module()(x), torch.linalg.det(x))


def test_bilinear():
    batches = [[torch.randn(n, 5), torch.randn(n, 4), torch.randn(3, 5, 4), torch.randn(3)] for n in (3, 6)]
    check(F.bilinear, *batches, dynamic=[[0], [0]], gone=["_trilinear"])
