"""Running products, maxima and minima, as reductions of a triangle: as many elements as the axis has, squared."""

from __future__ import annotations

from typing import Any

import torch

from .registry import after, before

aten = torch.ops.aten


def _triangle(x: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
    """[..., n, n] with the axis last: row i holds the first i + 1 elements, and `fill` after them."""
    steps = torch.arange(x.shape[dim], device=x.device)
    inside = steps.unsqueeze(1) >= steps.unsqueeze(0)
    return torch.where(inside, x.transpose(dim, -1).unsqueeze(-2), torch.full([], fill, dtype=x.dtype, device=x.device))


@before(aten.cumprod.default)
@after(aten.cumprod.default)
def cumprod(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Right with zeros too, unlike sums of logarithms."""
    if dtype is None and not x.is_floating_point():
        dtype = torch.int64
    values = x.to(dtype or x.dtype)
    return aten.prod.dim_int(_triangle(values, dim, 1.0), -1).transpose(dim, -1) if x.dim() else values


@after(aten.cummax.default)
def cummax(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _last_extreme(x, dim, True)


@after(aten.cummin.default)
def cummin(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _last_extreme(x, dim, False)


def _last_extreme(x: torch.Tensor, dim: int, largest: bool) -> Any:
    """Values and places. Of equal elements PyTorch takes the last, so the triangle is read backwards."""
    if not x.is_floating_point() or not x.dim():
        return NotImplemented
    triangle = _triangle(x, dim, float("-inf") if largest else float("inf")).flip(-1)
    values, backwards = triangle.max(-1) if largest else triangle.min(-1)
    return values.transpose(dim, -1), (x.shape[dim] - 1 - backwards).transpose(dim, -1)


@after(aten.logcumsumexp.default)
def logcumsumexp(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.logsumexp(_triangle(x, dim, float("-inf")), -1).transpose(dim, -1) if x.dim() else x.clone()
