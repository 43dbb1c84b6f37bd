"""Pooling, with ONNX's padding and rounding rules."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops_nn import pad_spatial, resolve_pads
from .registry import Ints, register_op


@register_op("MaxPool")
def max_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Any = None,
    kernel_shape: Any,
    pads: Any = None,
    storage_order: int = 0,
    strides: Any = None,
    outputs: int = 1,
) -> Any:
    """The second output counts positions through the whole tensor, row by row or (`storage_order`) column by column."""
    rank = len(kernel_shape)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    size = x.shape[2:]
    pads = resolve_pads(size, kernel_shape, auto_pad, pads, strides, dilations)
    shift = [0] * rank
    values = x
    if pads[:rank] != pads[rank:] or any(2 * p > k for p, k in zip(pads, kernel_shape, strict=False)):
        low = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        values, shift, pads = pad_spatial(x, pads, low), pads[:rank], [0] * (2 * rank)
    function: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
    if outputs == 1:
        return function(values, kernel_shape, strides, pads[:rank], dilations, bool(ceil_mode))
    best, places = function(values, kernel_shape, strides, pads[:rank], dilations, bool(ceil_mode), return_indices=True)
    return best, _through_tensor(places, values.shape[2:], size, shift, storage_order)


def _through_tensor(places: Tensor, padded: Any, size: Any, shift: Any, storage_order: int) -> Tensor:
    """torch's positions within a padded plane as ONNX's positions within the tensor."""
    parts = []
    for length in reversed(padded):
        parts.append(places % length)
        places = places // length
    parts = [part - s for part, s in zip(reversed(parts), shift, strict=True)]
    order = range(len(size)) if not storage_order else reversed(range(len(size)))
    flat = torch.zeros_like(places)
    for i in order:
        flat = flat * size[i] + parts[i]
    planes = torch.arange(places.shape[0] * places.shape[1], device=places.device)
    offsets: Tensor = planes * math.prod(size)
    return flat + offsets.reshape(places.shape[:2] + (1,) * len(size))


@register_op("AveragePool")
def average_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Any = None,
    kernel_shape: Any,
    pads: Any = None,
    strides: Any = None,
) -> Tensor:
    rank = len(kernel_shape)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    pads = resolve_pads(x.shape[2:], kernel_shape, auto_pad, pads, strides, dilations)
    even = pads[:rank] == pads[rank:] and all(2 * p <= k for p, k in zip(pads, kernel_shape, strict=False))
    if even and all(d == 1 for d in dilations):
        function: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
        result: Tensor = function(x, kernel_shape, strides, pads[:rank], bool(ceil_mode), bool(count_include_pad))
        return result
    ones = torch.ones_like(x[:1, :1])
    counted = pad_spatial(ones, pads, 1.0 if count_include_pad else 0.0)
    window = (kernel_shape, strides, dilations, ceil_mode)
    return _window_sum(pad_spatial(x, pads), *window) / _window_sum(counted, *window)


def _window_sum(x: Tensor, kernel: Any, strides: Any, dilations: Any, ceil_mode: int) -> Tensor:
    """Sums over windows, as a convolution with ones on each channel."""
    rank = len(kernel)
    if ceil_mode:
        more = []
        for size, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True):
            steps = -(-(size - d * (k - 1) - 1) // s)
            if steps * s >= size:  # a window may not start beyond the end
                steps -= 1
            more.append(max(steps * s + d * (k - 1) + 1 - size, 0))
        x = pad_spatial(x, [0] * rank + more)
    function: Any = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    flat = x.reshape(-1, 1, *x.shape[2:])
    sums: Tensor = function(flat, x.new_ones(1, 1, *kernel), None, strides, 0, dilations)
    return sums.reshape(*x.shape[:2], *sums.shape[2:])


@register_op("LpPool")
def lp_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Any = None,
    kernel_shape: Any,
    p: int = 2,
    pads: Any = None,
    strides: Any = None,
) -> Tensor:
    rank = len(kernel_shape)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    pads = resolve_pads(x.shape[2:], kernel_shape, auto_pad, pads, strides, dilations)
    return _window_sum(pad_spatial(x.abs() ** p, pads), kernel_shape, strides, dilations, ceil_mode) ** (1 / p)


@register_op("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.dim())), keepdim=True)


@register_op("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    return x.amax(list(range(2, x.dim())), keepdim=True)


@register_op("GlobalLpPool")
def global_lp_pool(x: Tensor, *, p: int = 2) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, ord=p, dim=list(range(2, x.dim())), keepdim=True)
    return norm


@register_op("MaxUnpool")
def max_unpool(
    x: Tensor, places: Tensor, output_shape: Ints | None = None, *, kernel_shape: Any, pads: Any = None, strides: Any = None
) -> Tensor:
    rank = len(kernel_shape)
    strides, pads = strides or [1] * rank, pads or [0] * (2 * rank)
    size = [(x.shape[2 + i] - 1) * strides[i] - pads[i] - pads[rank + i] + kernel_shape[i] for i in range(rank)]
    # The positions count through a tensor of the natural size; a larger `output_shape` pads it at the far ends.
    whole = x.new_zeros(x.shape[0] * x.shape[1] * math.prod(size))
    whole = whole.scatter(0, places.reshape(-1), x.reshape(-1)).reshape(*x.shape[:2], *size)
    if output_shape is None:
        return whole
    return pad_spatial(whole, [0] * rank + [int(n) - s for n, s in zip(output_shape[2:], size, strict=True)])
