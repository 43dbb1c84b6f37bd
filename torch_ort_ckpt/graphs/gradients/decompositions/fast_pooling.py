"""The backward of max pooling in windows of 2 x 2 side by side, without indices: they take ONNX Runtime ten times as long as the maxima.

The plain form is `pooling.max_pool2d_with_indices_backward`. The forward stays one operator, which others can differentiate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .onnx_operators import space_to_depth
from .registry import fast
from .sizes import is_static, per_axis

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
        and x.dtype in (torch.float32, torch.float64)  # SpaceToDepth of ONNX Runtime takes no others
    )


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
    # The operator of the forward once more; equal computations are merged. Nobody reads its indices then, and they are left out.
    largest = aten.max_pool2d_with_indices.default(x, kernel_size, stride, padding, dilation, ceil_mode)[0]
    corners = torch.split(space_to_depth(x), x.shape[1], 1)
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
