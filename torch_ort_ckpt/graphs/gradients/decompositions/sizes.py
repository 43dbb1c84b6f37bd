"""Arithmetic on sizes that may be symbolic while a graph is traced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def is_static(*sizes: Any) -> bool:
    """Whether all sizes are plain numbers, known while the graph is traced."""
    return all(isinstance(size, int) for size in sizes)


def product(sizes: Iterable[Any]) -> Any:
    """The product of sizes, symbolic if one of them is (`math.prod` does the same, but its type says float)."""
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


def per_axis(value: Any, axes: int) -> list[Any]:
    """One value for each axis: operators take a single number, or a list of one, for all axes."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * axes if len(values) == 1 else values


def slice_axis(x: torch.Tensor, axis: int, start: Any, length: Any, step: int = 1) -> torch.Tensor:
    """`length` elements of one axis, each `step` after the one before. No node is made where that is the whole axis."""
    size = x.shape[axis]
    if is_static(start, length, size) and start == 0 and step == 1 and length == size:
        return x
    return torch.ops.aten.slice.Tensor(x, axis, start, start + (length - 1) * step + 1, step)


def apply_along_axes(x: torch.Tensor, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Multiplies the last axes by one matrix each: the first matrix is for the first of these axes."""
    for position, matrix in enumerate(matrices):
        axis = x.dim() - len(matrices) + position
        x = torch.matmul(x.transpose(axis, -1), matrix).transpose(axis, -1)
    return x
