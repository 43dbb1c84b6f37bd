"""Pooling to a given output size: the windows differ in size where the input's size is not a multiple of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .pooling import scatter_to_maxima
from .registry import after, before
from .sizes import apply_along_axes, is_static, per_axis, product

aten = torch.ops.aten


def averaging_matrix(outputs: Any, size: Any, like: torch.Tensor) -> torch.Tensor:
    """[outputs, size]: row i averages the elements of window i."""
    windows = torch.arange(outputs, device=like.device)
    start = windows * size // outputs
    end = ((windows + 1) * size + outputs - 1) // outputs
    positions = torch.arange(size, device=like.device)
    inside = (positions.unsqueeze(0) >= start.unsqueeze(1)) & (positions.unsqueeze(0) < end.unsqueeze(1))
    return inside.to(like.dtype) / (end - start).to(like.dtype).unsqueeze(1)


@after(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _average_backward(gradient, x, 2)


@after(aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool3d_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _average_backward(gradient, x, 3)


def _average_backward(gradient: torch.Tensor, x: torch.Tensor, axes: int) -> torch.Tensor:
    return apply_along_axes(gradient, [averaging_matrix(gradient.shape[-axes + i], x.shape[-axes + i], gradient) for i in range(axes)])


@after(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(x: torch.Tensor, output_size: Sequence[Any]) -> torch.Tensor:
    return _average(x, output_size, 2)


@after(aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool3d(x: torch.Tensor, output_size: Sequence[Any]) -> torch.Tensor:
    return _average(x, output_size, 3)


def _average(x: torch.Tensor, output_size: Sequence[Any], axes: int) -> torch.Tensor:
    sizes = [x.shape[-axes + i] for i in range(axes)]
    return apply_along_axes(x, [averaging_matrix(out, size, x).transpose(0, 1) for out, size in zip(output_size, sizes, strict=True)])


# Pooling to a single element is a mean, whose backward needs none of this.


@before(aten.adaptive_avg_pool1d.default)
def adaptive_avg_pool1d_to_one(x: torch.Tensor, output_size: Sequence[Any]) -> torch.Tensor:
    if _is_one(output_size):
        return x.mean(-1, keepdim=True)
    return aten._adaptive_avg_pool2d(x.unsqueeze(-2), [1, *output_size]).squeeze(-2)


@before(aten.adaptive_avg_pool2d.default)
def adaptive_avg_pool2d_to_one(x: torch.Tensor, output_size: Sequence[Any]) -> torch.Tensor:
    return x.mean([-2, -1], keepdim=True) if _is_one(output_size) else aten._adaptive_avg_pool2d(x, output_size)


@before(aten.adaptive_avg_pool3d.default)
def adaptive_avg_pool3d_to_one(x: torch.Tensor, output_size: Sequence[Any]) -> torch.Tensor:
    return x.mean([-3, -2, -1], keepdim=True) if _is_one(output_size) else aten._adaptive_avg_pool3d(x, output_size)


def _is_one(output_size: Sequence[Any]) -> bool:
    return is_static(*output_size) and all(size == 1 for size in output_size)


@after(aten.adaptive_max_pool2d.default)
def adaptive_max_pool2d(x: torch.Tensor, output_size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return _maximum(x, output_size, 2)


@after(aten.adaptive_max_pool3d.default)
def adaptive_max_pool3d(x: torch.Tensor, output_size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return _maximum(x, output_size, 3)


def _maximum(x: torch.Tensor, output_size: Sequence[int], axes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathers every window, filled up with its own last element to the size of the largest, and takes the first maximum of each."""
    lead, spatial, out = list(x.shape[:-axes]), list(x.shape[-axes:]), per_axis(output_size, axes)
    if not is_static(*spatial, *out):
        return NotImplemented
    strides = [product(spatial[i + 1 :]) for i in range(axes)]
    positions: Any = 0
    for i in range(axes):
        along = _window_positions(out[i], spatial[i], x.device) * strides[i]  # [outputs, widest window]
        shape = [1] * (2 * axes)
        shape[i], shape[axes + i] = along.shape
        positions = positions + along.reshape(shape)
    positions = positions.reshape([product(out), product(positions.shape[axes:])])
    windows = x.reshape([*lead, product(spatial)])[..., positions]
    values, chosen = windows.max(-1)
    indices = torch.gather(positions.expand(windows.shape), -1, chosen.unsqueeze(-1)).squeeze(-1)
    return values.reshape([*lead, *out]), indices.reshape([*lead, *out])


def _window_positions(outputs: int, size: int, device: torch.device) -> torch.Tensor:
    """[outputs, widest window]: made of arange, for a constant can't be lifted out of a decomposition."""
    widest = max(-((i + 1) * size // -outputs) - i * size // outputs for i in range(outputs))
    windows = torch.arange(outputs, device=device).unsqueeze(1)
    last = ((windows + 1) * size + outputs - 1) // outputs - 1
    return torch.minimum(windows * size // outputs + torch.arange(widest, device=device), last)


@after(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d_backward(gradient: torch.Tensor, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return scatter_to_maxima(gradient, x, indices, 2)


@after(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool3d_backward(gradient: torch.Tensor, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return scatter_to_maxima(gradient, x, indices, 3)
