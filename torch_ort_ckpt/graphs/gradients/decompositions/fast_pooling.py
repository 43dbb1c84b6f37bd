"""Max pooling in windows of 2 x 2 side by side, without indices: computing them takes ONNX Runtime ten times as long as the maxima.

The plain form is PyTorch's operator and `pooling.max_pool2d_with_indices_backward`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .registry import fast
from .sizes import is_static, per_axis, slice_axis

aten = torch.ops.aten


def _applies(x: torch.Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> bool:
    height, width = x.shape[-2:]
    return (
        x.dim() == 4
        and is_static(height, width)
        and not height % 2
        and not width % 2
        and per_axis(kernel_size, 2) == [2, 2]
        and (not stride or per_axis(stride, 2) == [2, 2])
        and per_axis(padding, 2) == [0, 0]
        and per_axis(dilation, 2) == [1, 1]
        and x.is_floating_point()
    )


def _corners(x: torch.Tensor) -> list[torch.Tensor]:
    """The four elements of every window, in the order in which PyTorch looks at them."""
    height, width = x.shape[2] // 2, x.shape[3] // 2
    return [slice_axis(slice_axis(x, 2, row, height, 2), 3, column, width, 2) for row in (0, 1) for column in (0, 1)]


def _maximum(corners: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.maximum(torch.maximum(corners[0], corners[1]), torch.maximum(corners[2], corners[3]))


@fast(aten.max_pool2d_with_indices.default)
def max_pool2d_with_indices(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices are right, for those who asked for them (MaxUnpool). Our backward does not read them: then they are dead code."""
    if not _applies(x, kernel_size, stride, padding, dilation):
        return NotImplemented
    corners = _corners(x)
    result = _maximum(corners)
    width = x.shape[3]
    within = torch.full([], width + 1, dtype=torch.int64, device=x.device)
    for corner, offset in zip(reversed(corners[:3]), (width, 1, 0), strict=True):
        within = torch.where(corner == result, offset, within)
    rows = torch.arange(x.shape[2] // 2, device=x.device).unsqueeze(1) * (2 * width)
    columns = torch.arange(width // 2, device=x.device) * 2
    return result, rows + columns + within


@fast(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_with_indices_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: torch.Tensor,
) -> torch.Tensor:
    """Each window's gradient goes to its first maximum: what a corner takes is not left for the next."""
    if not _applies(x, kernel_size, stride, padding, dilation):
        return NotImplemented
    corners = _corners(x)
    largest = _maximum(corners)
    rest = gradient
    shares = []
    for corner in corners[:3]:
        share = rest * (corner == largest).to(gradient.dtype)
        shares.append(share)
        rest = rest - share
    shares.append(rest)
    batch, channels, height, width = gradient.shape
    rows = [torch.stack(shares[2 * row : 2 * row + 2], -1).reshape([batch, channels, height, 1, 2 * width]) for row in (0, 1)]
    return torch.cat(rows, 3).reshape([batch, channels, 2 * height, 2 * width])
