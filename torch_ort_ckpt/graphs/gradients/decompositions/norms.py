"""Weight normalization."""

from __future__ import annotations

import torch

from .registry import before

aten = torch.ops.aten


@before(aten._weight_norm.default)
def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return weight_norm_interface(v, g, dim)[0]


@before(aten._weight_norm_interface.default)
def weight_norm_interface(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The direction `v` with the length `g`, for each element of the axis, or for the whole tensor with `dim=-1`."""
    squares = v * v
    if dim == -1:
        norm = torch.sqrt(squares.sum())
    else:
        norm = torch.sqrt(squares.sum([axis for axis in range(v.dim()) if axis != dim], keepdim=True))
    return v * (g / norm), norm
