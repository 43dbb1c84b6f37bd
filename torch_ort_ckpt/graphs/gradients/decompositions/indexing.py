"""Operators that choose elements: diagonals, medians, order statistics, strided views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .registry import after, before
from .sizes import product

aten = torch.ops.aten


@before(aten.diagonal.default)
def diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    first, second = dim1 % x.dim(), dim2 % x.dim()
    row, column = max(-offset, 0), max(offset, 0)
    length = torch.sym_max(torch.sym_min(x.shape[first] - row, x.shape[second] - column), 0)
    steps = torch.arange(length, device=x.device)
    others = [axis for axis in range(x.dim()) if axis not in (first, second)]
    return x.permute([*others, first, second])[..., steps + row, steps + column]


@after(aten.eye.default)
def eye(size: Any, **options: Any) -> torch.Tensor:
    return eye_of(size, size, **options)


@after(aten.eye.m)
def eye_of(rows: Any, columns: Any, **options: Any) -> torch.Tensor:
    """PyTorch's own decomposition compares bytes, for which ONNX Runtime has no kernel."""
    device = options.get("device")
    same = torch.arange(rows, device=device).unsqueeze(-1) == torch.arange(columns, device=device)
    return same.to(options.get("dtype") or torch.get_default_dtype())


@before(aten.median.dim)
def median(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's median is the lower of the two in the middle."""
    return kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


@before(aten.median.default)
def median_of_all(x: torch.Tensor) -> torch.Tensor:
    return median(x.reshape([product(x.shape)]), 0)[0]


@before(aten.kthvalue.default)
def kthvalue(x: torch.Tensor, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.topk(x, k, dim, largest=False, sorted=True)
    value, index = values.narrow(dim, k - 1, 1), indices.narrow(dim, k - 1, 1)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


@before(aten.as_strided.default)
@after(aten.as_strided.default)
def as_strided(x: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None) -> torch.Tensor:
    """A gather over the elements, where they lie in memory as they are counted."""
    if not x.is_contiguous():
        return NotImplemented
    return x.reshape([product(x.shape)])[_strided_positions(x, size, stride, storage_offset)].reshape(list(size))


@after(aten.as_strided_scatter.default)
def as_strided_scatter(
    x: torch.Tensor, src: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> torch.Tensor:
    if not x.is_contiguous():
        return NotImplemented
    flat = x.reshape([product(x.shape)])
    return flat.scatter(0, _strided_positions(x, size, stride, storage_offset), src.reshape([product(size)])).reshape(x.shape)


def _strided_positions(x: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any) -> torch.Tensor:
    """[elements of the view]: where each lies in the flat tensor."""
    positions = torch.zeros([1] * len(size), dtype=torch.int64, device=x.device) + (storage_offset or 0)
    for axis, (length, step) in enumerate(zip(size, stride, strict=True)):
        positions = positions + (torch.arange(length, device=x.device) * step).reshape([length, *[1] * (len(size) - 1 - axis)])
    return positions.reshape([product(size)])


@after(aten.searchsorted.Tensor)
def searchsorted(
    boundaries: torch.Tensor,
    values: torch.Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> torch.Tensor:
    """How many boundaries are below each value."""
    if sorter is not None:
        return NotImplemented
    edges = boundaries if boundaries.dim() == 1 else boundaries.unsqueeze(-2)
    below = edges <= values.unsqueeze(-1) if right or side == "right" else edges < values.unsqueeze(-1)
    return below.sum(-1).to(torch.int32 if out_int32 else torch.int64)
