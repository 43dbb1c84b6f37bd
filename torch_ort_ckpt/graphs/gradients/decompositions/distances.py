"""Distances between all pairs of points."""

from __future__ import annotations

import torch

from .registry import before

aten = torch.ops.aten


@before(aten.cdist.default)
def cdist(a: torch.Tensor, b: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> torch.Tensor:
    """Equal points have the gradient zero, as in PyTorch: the square root of zero has none."""
    if p == 0:
        return NotImplemented  # it counts differing coordinates, which has no gradient
    distance = (a.unsqueeze(-2) - b.unsqueeze(-3)).abs()
    if p == 1:
        return distance.sum(-1)
    if p == float("inf"):
        return distance.amax(-1)
    total = (distance * distance if p == 2 else _power(distance, p)).sum(-1)
    equal = total == 0
    root = torch.where(equal, 1.0, total)
    return torch.where(equal, 0.0, torch.sqrt(root) if p == 2 else root ** (1.0 / p))


def _power(distance: torch.Tensor, p: float) -> torch.Tensor:
    """With p < 1, the power of zero has no gradient either."""
    equal = distance == 0
    return torch.where(equal, 0.0, torch.where(equal, 1.0, distance) ** p)
