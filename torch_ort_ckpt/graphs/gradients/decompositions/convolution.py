"""The backward of convolutions, in 1 to 3 dimensions, grouped, dilated, strided and transposed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from .registry import after
from .sizes import is_static, per_axis, product, slice_axis

aten = torch.ops.aten
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

# With more kernel positions than this, a slice for each makes a larger graph than it saves time.
MOST_POSITIONS = 64


@after(aten.convolution_backward.default)
def convolution_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[Any],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[Any],
    groups: int,
    output_mask: Sequence[bool],
) -> Gradients:
    axes = weight.dim() - 2
    stride, padding, dilation = (per_axis(value, axes) for value in (stride, padding, dilation))
    of_input = of_weight = of_bias = None
    if output_mask[0]:
        of_input = input_gradient(gradient, x, weight, stride, padding, dilation, transposed, groups)
    if output_mask[1]:
        # A transposed convolution is the backward of a plain one: its input takes the place of the gradient.
        source, target = (gradient, x) if transposed else (x, gradient)
        kernel = [int(size) for size in weight.shape[2:]]
        if groups == 1 and product(kernel) <= MOST_POSITIONS:
            of_weight = weight_gradient_by_slices(source, target, kernel, stride, padding, dilation)
        else:
            of_weight = weight_gradient_by_convolution(source, target, kernel, stride, padding, dilation, groups)
    if output_mask[2]:
        of_bias = gradient.sum([0, *range(2, 2 + axes)])
    return of_input, of_weight, of_bias


def input_gradient(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[Any],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> torch.Tensor:
    """The gradient of a convolution's input: the convolution the other way round."""
    axes = weight.dim() - 2
    extra = [0] * axes if transposed else [_missing(gradient, x, weight, stride, padding, dilation, i) for i in range(axes)]
    result: torch.Tensor = aten.convolution(gradient, weight, None, stride, padding, dilation, not transposed, extra, groups)
    for axis in range(2, 2 + axes):
        result = slice_axis(result, axis, 0, x.shape[axis])
    return result


def _missing(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[Any],
    dilation: Sequence[int],
    i: int,
) -> Any:
    """How many elements of the input's axis the windows do not reach. Where that is symbolic, the most it can be: the rest is cut off."""
    if stride[i] == 1:
        return 0
    reached = (gradient.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[2 + i] - 1) + 1
    size = x.shape[2 + i]
    return size - reached if is_static(size, reached) else stride[i] - 1


def weight_gradient_by_convolution(
    x: torch.Tensor,
    gradient: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[Any],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """A convolution of the input with the gradient: batch and channels exchanged, stride and dilation too."""
    axes = len(kernel)
    batch, channels, *spatial = x.shape
    exchanged = x.transpose(0, 1)
    if groups > 1:
        split = x.reshape([batch, groups, channels // groups, *spatial])
        exchanged = split.permute([2, 1, 0, *range(3, 3 + axes)]).reshape([channels // groups, groups * batch, *spatial])
    result: torch.Tensor = aten.convolution(exchanged, gradient.transpose(0, 1), None, dilation, padding, stride, False, [0] * axes, groups)
    for i in range(axes):
        result = slice_axis(result, 2 + i, 0, kernel[i])
    return result.transpose(0, 1)


def weight_gradient_by_slices(
    x: torch.Tensor,
    gradient: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[Any],
    dilation: Sequence[int],
) -> torch.Tensor:
    """One slice of the input for each kernel position, and one matrix product of all of them with the gradient. For one group."""
    axes = len(kernel)
    batch, channels = x.shape[:2]
    out_channels, *spatial = gradient.shape[1:]
    pads = [pad for size in reversed(padding) for pad in (size, size)]
    padded = aten.constant_pad_nd(x, pads, 0.0) if any(pads) else x
    pieces = []
    for position in itertools.product(*(range(size) for size in kernel)):
        piece = padded
        for i in range(axes):
            piece = slice_axis(piece, 2 + i, position[i] * dilation[i], spatial[i], stride[i])
        pieces.append(piece)
    rows = batch * product(spatial)
    columns = torch.stack(pieces).permute([1, *range(3, 3 + axes), 0, 2]).reshape([rows, len(pieces) * channels])
    result = torch.matmul(gradient.transpose(0, 1).reshape([out_channels, rows]), columns)
    return result.reshape([out_channels, len(pieces), channels]).transpose(1, 2).reshape([out_channels, channels, *kernel])
