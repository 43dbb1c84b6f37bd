"""Padding: negative pads, replication's backward, and the shape of a padded tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .registry import after, shape_of
from .sizes import apply_along_axes

aten = torch.ops.aten


@after(aten.constant_pad_nd.default)
def constant_pad_nd(x: torch.Tensor, pad: Sequence[Any], value: float = 0) -> torch.Tensor:
    """Negative pads, which the gradient of a pad has, as slices; the others stay."""
    if not any(isinstance(size, int) and size < 0 for size in pad):
        return NotImplemented
    result = x
    for i in range(len(pad) // 2):
        axis = x.dim() - 1 - i
        start, end = (-size if isinstance(size, int) and size < 0 else 0 for size in (pad[2 * i], pad[2 * i + 1]))
        if start or end:
            result = aten.slice.Tensor(result, axis, start, x.shape[axis] - end)
    positive = [0 if isinstance(size, int) and size < 0 else size for size in pad]
    if any(not isinstance(size, int) or size for size in positive):
        return aten.constant_pad_nd.default(result, positive, value)
    return result.clone()


@shape_of(aten.constant_pad_nd.default)
def constant_pad_nd_shape(fake_mode: Any, operator: Any, x: torch.Tensor, pad: Sequence[Any], value: float = 0) -> torch.Tensor:
    """PyTorch's own function calls int() on a symbolic size."""
    shape = list(x.shape)
    for i in range(len(pad) // 2):
        shape[-1 - i] = shape[-1 - i] + pad[2 * i] + pad[2 * i + 1]
    with fake_mode:
        return torch.empty(shape, dtype=x.dtype, device=x.device)


@after(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def replication_pad_backward(gradient: torch.Tensor, x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """One matrix for each axis, with a one where an output element takes its value from."""
    axes = len(padding) // 2
    matrices = []
    for i in range(axes):
        axis = x.dim() - axes + i
        size = x.shape[axis]
        source = torch.arange(gradient.shape[axis], device=x.device) - padding[2 * (axes - 1 - i)]
        source = torch.clamp(source, min=0, max=size - 1)
        matrices.append((source.unsqueeze(1) == torch.arange(size, device=x.device).unsqueeze(0)).to(gradient.dtype))
    return apply_along_axes(gradient, matrices)
