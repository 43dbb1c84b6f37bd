"""The backward of interpolation, as one matrix for each axis.

PyTorch writes most interpolations as gathers before autograd sees them; these serve the ones that it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .registry import AFTER
from .sizes import apply_along_axes, is_static

aten = torch.ops.aten
Matrix = Callable[[Any, Any, bool, float | None, torch.Tensor], torch.Tensor]


def _coordinates(outputs: Any, size: Any, align_corners: bool, scale: float | None, like: torch.Tensor) -> torch.Tensor:
    """Where in the input each output element lies."""
    index = torch.arange(outputs, device=like.device).to(like.dtype)
    if align_corners:
        return index * 0.0 if is_static(outputs) and outputs == 1 else index * ((size - 1) / (outputs - 1))
    return (index + 0.5) * (1.0 / scale if scale else size / outputs) - 0.5


def linear_matrix(outputs: Any, size: Any, align_corners: bool, scale: float | None, like: torch.Tensor) -> torch.Tensor:
    """[outputs, size]: the weights of linear interpolation."""
    where = torch.clamp(_coordinates(outputs, size, align_corners, scale, like), min=0.0, max=size - 1)
    positions = torch.arange(size, device=like.device).to(like.dtype)
    return torch.clamp(1.0 - (where.unsqueeze(1) - positions.unsqueeze(0)).abs(), min=0.0)


def cubic_matrix(outputs: Any, size: Any, align_corners: bool, scale: float | None, like: torch.Tensor) -> torch.Tensor:
    """[outputs, size]: the weights of cubic interpolation over four neighbours, those outside moved to the border."""
    a = -0.75  # PyTorch's constant
    where = _coordinates(outputs, size, align_corners, scale, like)
    below = torch.floor(where)
    positions = torch.arange(size, device=like.device).to(like.dtype)
    result = torch.zeros([outputs, size], dtype=like.dtype, device=like.device)
    for neighbour in range(-1, 3):
        distance = (where - (below + neighbour)).abs()
        near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
        far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        position = torch.clamp(below + neighbour, min=0, max=size - 1)
        at = (position.unsqueeze(1) == positions.unsqueeze(0)).to(like.dtype)
        result = result + at * (near if neighbour in (0, 1) else far).unsqueeze(1)
    return result


def nearest_matrix(outputs: Any, size: Any, exact: bool, scale: float | None, like: torch.Tensor) -> torch.Tensor:
    """[outputs, size]: a one where an output element takes its value from; `exact` measures from the elements' middles."""
    index = torch.arange(outputs, device=like.device).to(like.dtype)
    where = torch.floor((index + 0.5 if exact else index) * (1.0 / scale if scale else size / outputs))
    positions = torch.arange(size, device=like.device).to(like.dtype)
    return (torch.clamp(where, max=size - 1).unsqueeze(1) == positions.unsqueeze(0)).to(like.dtype)


def _backward(matrix: Matrix, exact: bool | None = None) -> Callable[..., torch.Tensor]:
    """The backward of an interpolation. Linear and cubic ones have `align_corners` before their scales, nearest ones have not."""

    def backward(gradient: torch.Tensor, output_size: Sequence[Any], input_size: Sequence[Any], *rest: Any) -> torch.Tensor:
        flag, scales = (rest[0], rest[1:]) if exact is None else (exact, rest)
        scales = (*scales, *[None] * (len(output_size) - len(scales)))
        sizes = zip(output_size, input_size[2:], scales, strict=True)
        return apply_along_axes(gradient, [matrix(out, size, flag, scale, gradient) for out, size, scale in sizes])

    return backward


AFTER.update(
    {
        aten.upsample_linear1d_backward.default: _backward(linear_matrix),
        aten.upsample_bilinear2d_backward.default: _backward(linear_matrix),
        aten.upsample_trilinear3d_backward.default: _backward(linear_matrix),
        aten.upsample_bicubic2d_backward.default: _backward(cubic_matrix),
        aten.upsample_nearest1d_backward.default: _backward(nearest_matrix, exact=False),
        aten.upsample_nearest2d_backward.default: _backward(nearest_matrix, exact=False),
        aten.upsample_nearest3d_backward.default: _backward(nearest_matrix, exact=False),
        aten._upsample_nearest_exact1d_backward.default: _backward(nearest_matrix, exact=True),
        aten._upsample_nearest_exact2d_backward.default: _backward(nearest_matrix, exact=True),
        aten._upsample_nearest_exact3d_backward.default: _backward(nearest_matrix, exact=True),
    }
)
