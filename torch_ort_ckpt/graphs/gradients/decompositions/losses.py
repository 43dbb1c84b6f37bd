"""Losses that PyTorch's own decompositions get wrong, or that can't be exported as they are."""

from __future__ import annotations

import math

import torch

from .registry import FUNCTIONS, before

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


@before(aten.multilabel_margin_loss.default)
def multilabel_margin_loss(x: torch.Tensor, target: torch.Tensor, reduction: int = MEAN) -> torch.Tensor:
    """PyTorch 2.13's decomposition counts the places after the first -1 of a row as if they named class 0."""
    scores, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = scores.shape[1]
    ended = torch.cumsum((labels < 0).to(torch.int64), 1) > 0
    named = torch.where(ended, 0, labels)
    is_class = (named.unsqueeze(2) == torch.arange(classes, device=x.device)) & ~ended.unsqueeze(2)  # [batch, place, class]
    is_target = is_class.any(1)
    wanted = torch.gather(scores, 1, named)
    margins = torch.clamp(1.0 - wanted.unsqueeze(2) + scores.unsqueeze(1), min=0)
    counted = (~ended).unsqueeze(2) & ~is_target.unsqueeze(1)
    losses = (margins * counted.to(x.dtype)).sum([1, 2]) / classes
    if reduction == NONE:
        return losses if x.dim() == 2 else losses.squeeze(0)
    return losses.mean() if reduction == MEAN else losses.sum()


@before(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss_forward(x: torch.Tensor, target: torch.Tensor, reduction: int) -> tuple[torch.Tensor, torch.Tensor]:
    return multilabel_margin_loss(x, target, reduction), torch.zeros_like(x)


def gaussian_nll_loss(
    input: torch.Tensor,  # PyTorch's names: it may be called by them
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """`torch.nn.functional.gaussian_nll_loss` without its check that no variance is negative, which is a branch on values."""
    variance = var * torch.ones_like(input) if isinstance(var, float) else var
    if variance.dim() == input.dim() - 1:
        variance = variance.unsqueeze(-1)
    variance = variance + (torch.clamp(variance, min=eps) - variance).detach()  # its gradient is that of the unclamped variance
    losses = 0.5 * (torch.log(variance) + (input - target) ** 2 / variance)
    if full:
        losses = losses + 0.5 * math.log(2 * math.pi)
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


FUNCTIONS[torch.nn.functional.gaussian_nll_loss] = gaussian_nll_loss
