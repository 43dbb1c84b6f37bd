"""Faster forms of activations' and average pooling's backward. Each equals PyTorch's, or the plain form beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .onnx_operators import is_positive
from .registry import fast
from .sizes import is_static, per_axis

aten = torch.ops.aten


@fast(aten.threshold_backward.default)
def threshold_backward(gradient: torch.Tensor, x: torch.Tensor, threshold: float) -> torch.Tensor:
    """ReLU's gradient times one or zero: Where is several times slower in ONNX Runtime 1.19.

    An infinite gradient of a negative element becomes NaN here, and zero in PyTorch; training has failed by then in both.
    """
    if threshold != 0 or x.dtype != torch.float32:
        return NotImplemented
    return gradient * is_positive(x)


@fast(aten.avg_pool2d_backward.default)
def avg_pool2d_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    """Windows side by side: each element of the gradient is repeated over its window."""
    kernel = per_axis(kernel_size, 2)
    height, width = x.shape[-2:]
    if (
        (stride and per_axis(stride, 2) != kernel)
        or any(padding)
        or not is_static(height, width)
        or height % kernel[0]
        or width % kernel[1]
    ):
        return NotImplemented
    share = gradient / float(divisor_override or kernel[0] * kernel[1])
    lead = list(gradient.shape[:-2])
    high, wide = height // kernel[0], width // kernel[1]
    repeated = share.reshape([*lead, high, 1, wide, 1]).expand([*lead, high, kernel[0], wide, kernel[1]])
    return repeated.reshape([*lead, height, width])
