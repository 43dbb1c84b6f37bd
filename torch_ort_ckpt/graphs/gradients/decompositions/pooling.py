"""Average and max pooling with a fixed window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .registry import after
from .sizes import is_static, per_axis, product, slice_axis

aten = torch.ops.aten


@after(aten.avg_pool2d_backward.default)
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
    return _average_backward(gradient, x, 2, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@after(aten.avg_pool3d_backward.default)
def avg_pool3d_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    return _average_backward(gradient, x, 3, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@after(aten.avg_pool2d.default)
def avg_pool2d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    return _average(x, 2, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@after(aten.avg_pool3d.default)
def avg_pool3d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    return _average(x, 3, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def _average(
    x: torch.Tensor,
    axes: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    """The forward where ONNX's AveragePool computes something else: it has no divisor, and counts a last, partial window otherwise."""
    if not divisor_override and not ceil_mode:
        return NotImplemented
    kernel, pads = per_axis(kernel_size, axes), per_axis(padding, axes)
    steps = per_axis(stride, axes) if stride else kernel
    lead, spatial = list(x.shape[:-axes]), list(x.shape[-axes:])
    out = [_windows(spatial[i], kernel[i], steps[i], pads[i], ceil_mode) for i in range(axes)]
    # Enough zeros after each axis for the last window.
    around = [value for i in reversed(range(axes)) for value in (pads[i], max(pads[i], kernel[i] + steps[i] - 1) if ceil_mode else pads[i])]
    planes = aten.constant_pad_nd(x.reshape([product(lead), 1, *spatial]), around, 0.0)
    ones = torch.ones([1, 1, *kernel], dtype=x.dtype, device=x.device)
    sums = aten.convolution(planes, ones, None, steps, [0] * axes, [1] * axes, False, [0] * axes, 1)
    for i in range(axes):
        sums = slice_axis(sums, 2 + i, 0, out[i])
    divided = _divide_by_counts(sums, spatial, kernel, steps, pads, ceil_mode, count_include_pad, divisor_override)
    return divided.reshape([*lead, *out])


def _windows(size: Any, kernel: int, stride: int, padding: int, ceil_mode: bool) -> Any:
    """How many windows there are along an axis. One that starts in the padding after the axis does not count."""
    if not ceil_mode:
        return (size + 2 * padding - kernel) // stride + 1
    return torch.sym_min((size + 2 * padding - kernel + stride - 1) // stride + 1, (size + padding + stride - 1) // stride)


def _average_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    axes: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    """The gradient divided by the windows' sizes, and a transposed convolution with ones to spread it over the windows."""
    kernel, pads = per_axis(kernel_size, axes), per_axis(padding, axes)
    steps = per_axis(stride, axes) if stride else kernel
    lead, spatial, out = list(x.shape[:-axes]), list(x.shape[-axes:]), list(gradient.shape[-axes:])
    shares = _divide_by_counts(gradient, spatial, kernel, steps, pads, ceil_mode, count_include_pad, divisor_override)
    planes = shares.reshape([product(lead), 1, *out])
    ones = torch.ones([1, 1, *kernel], dtype=gradient.dtype, device=gradient.device)
    spread = aten.convolution(planes, ones, None, steps, [0] * axes, [1] * axes, True, [0] * axes, 1)
    reaches = [(out[i] - 1) * steps[i] + kernel[i] for i in range(axes)]
    if not all(is_static(spatial[i], reaches[i]) and reaches[i] >= pads[i] + spatial[i] for i in range(axes)):
        # The windows may end before the axis does: less than a step and a window are missing.
        spread = aten.constant_pad_nd(spread, [value for i in reversed(range(axes)) for value in (0, steps[i] + kernel[i])], 0.0)
    for i in range(axes):
        spread = slice_axis(spread, 2 + i, pads[i], spatial[i])
    return spread.reshape([*lead, *spatial])


def _divide_by_counts(
    x: torch.Tensor,
    spatial: Sequence[Any],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    """Divides each window by the number of elements that PyTorch says it has."""
    if divisor_override:
        return x / divisor_override
    axes = len(kernel)
    if not ceil_mode and (count_include_pad or not any(padding)):
        return x / float(product(kernel))
    for i in range(axes):
        windows = x.shape[x.dim() - axes + i]
        start = torch.arange(windows, device=x.device) * stride[i] - padding[i]
        end = torch.clamp(start + kernel[i], max=spatial[i] + padding[i])
        if not count_include_pad:
            start, end = torch.clamp(start, min=0), torch.clamp(end, max=spatial[i])
        x = x / (end - start).to(x.dtype).reshape([windows, *[1] * (axes - 1 - i)])
    return x


@after(aten.max_pool2d_with_indices_backward.default)
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
    return scatter_to_maxima(gradient, x, indices, 2)


@after(aten.max_pool3d_with_indices_backward.default)
def max_pool3d_with_indices_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: torch.Tensor,
) -> torch.Tensor:
    return scatter_to_maxima(gradient, x, indices, 3)


def scatter_to_maxima(gradient: torch.Tensor, x: torch.Tensor, indices: torch.Tensor, axes: int) -> torch.Tensor:
    """Adds each window's gradient to the element that was its maximum; `indices` count within a plane."""
    lead = list(x.shape[:-axes])
    windows = product(gradient.shape[-axes:])
    zeros = torch.zeros([*lead, product(x.shape[-axes:])], dtype=gradient.dtype, device=gradient.device)
    return zeros.scatter_add(-1, indices.reshape([*lead, windows]), gradient.reshape([*lead, windows])).reshape(x.shape)
