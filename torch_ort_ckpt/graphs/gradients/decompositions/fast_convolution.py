"""Faster forms of the gradient of a convolution's weight, chosen by shape. Each equals `convolution.convolution_backward`.

ONNX Runtime multiplies matrices well and copies them badly: the forms differ in how few copies they make. They are for convolutions in
one and two dimensions that are not transposed, whose image size is known; the batch may be dynamic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .convolution import Gradients, convolution_backward, weight_gradient_by_convolution
from .registry import fast
from .sizes import is_static, per_axis, slice_axis

aten = torch.ops.aten
MANY_CHANNELS = 64
"""From here on one deep product over the batch is faster than a product for each image."""
LARGE_KERNEL = 49
"""From here on a convolution with the roles of input and gradient exchanged is faster than slices."""
WIDEST_DEPTHWISE = 48
"""The depthwise form multiplies whole rows of the image: it computes as many products as the image is wide."""


@dataclass(frozen=True)
class Geometry:
    """A convolution in two dimensions: [N, C, H, W] to [N, O, h, w]."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


@fast(aten.convolution_backward.default)
def fast_convolution_backward(
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
    if transposed or axes > 2 or not is_static(*x.shape[1:], *gradient.shape[1:]):
        return NotImplemented
    rest = (bias_sizes, stride, padding, dilation, transposed, output_padding, groups)
    of_input, _, of_bias = convolution_backward(gradient, x, weight, *rest, [output_mask[0], False, output_mask[2]])
    geometry = Geometry(_two(weight.shape[2:], axes, 1), _two(stride, axes, 1), _two(padding, axes, 0), _two(dilation, axes, 1), groups)
    if output_mask[0] and _is_pointwise(geometry) and groups == 1:
        of_input = aten.convolution(gradient, weight.transpose(0, 1), None, [1] * axes, [0] * axes, [1] * axes, False, [0] * axes, 1)
    of_weight = None
    if output_mask[1]:
        image, outputs = (x.unsqueeze(2), gradient.unsqueeze(2)) if axes == 1 else (x, gradient)
        of_weight = weight_gradient(image, outputs, geometry).reshape(weight.shape)
    return of_input, of_weight, of_bias


def _two(values: Sequence[Any], axes: int, other: int) -> tuple[int, int]:
    """A value for each of two axes; a convolution in one dimension gets another before its own."""
    given = [int(value) for value in per_axis(list(values), axes)]
    return (other, given[0]) if axes == 1 else (given[0], given[1])


def weight_gradient(x: torch.Tensor, gradient: torch.Tensor, g: Geometry) -> torch.Tensor:
    """[O, C / groups, *kernel], by the form that is fastest for the shape."""
    channels, width = x.shape[1], x.shape[3]
    if g.groups == 1 and _is_pointwise(g):
        return pointwise(x, gradient)
    if g.kernel[0] * g.kernel[1] >= LARGE_KERNEL:
        return weight_gradient_by_convolution(x, gradient, g.kernel, g.stride, g.padding, g.dilation, g.groups)
    if g.groups == 1:
        return deep(x, gradient, g) if channels >= MANY_CHANNELS else row_by_row(x, gradient, g)
    if g.groups == channels == gradient.shape[1] and width <= WIDEST_DEPTHWISE:
        return depthwise(x, gradient, g)
    return grouped(x, gradient, g)


def _is_pointwise(g: Geometry) -> bool:
    return (g.kernel, g.stride, g.padding) == ((1, 1), (1, 1), (0, 0))


def sum_over_batch(x: torch.Tensor) -> torch.Tensor:
    """A product with ones: faster than ReduceSum along the first axis."""
    shape = list(x.shape[1:])
    ones = torch.ones([1, x.shape[0]], dtype=x.dtype, device=x.device)
    return torch.matmul(ones, x.reshape([x.shape[0], torch.Size(shape).numel()])).reshape(shape)


def pointwise(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    batch, channels, height, width = x.shape
    outputs = gradient.shape[1]
    product = torch.matmul(gradient.reshape([batch, outputs, height * width]), x.reshape([batch, channels, height * width]).transpose(1, 2))
    return sum_over_batch(product).reshape([outputs, channels, 1, 1])


def _shifted(x: torch.Tensor, width: int, g: Geometry) -> list[torch.Tensor]:
    """The padded image, once for each column of the kernel, with only the columns that it meets."""
    if any(g.padding):
        x = aten.constant_pad_nd(x, [g.padding[1], g.padding[1], g.padding[0], g.padding[0]], 0.0)
    return [slice_axis(x, 3, column * g.dilation[1], width, g.stride[1]) for column in range(g.kernel[1])]


def _met_by_row(x: torch.Tensor, row: int, height: int, g: Geometry) -> torch.Tensor:
    return slice_axis(x, 2, row * g.dilation[0], height, g.stride[0])


def row_by_row(x: torch.Tensor, gradient: torch.Tensor, g: Geometry) -> torch.Tensor:
    """For few channels: one product of each image for each row of the kernel."""
    batch, channels = x.shape[:2]
    outputs, height, width = gradient.shape[1:]
    rows, columns = g.kernel
    wide = torch.cat(_shifted(x, width, g), 1)
    right = gradient.reshape([batch, outputs, height * width]).transpose(1, 2)
    products = [
        torch.matmul(_met_by_row(wide, row, height, g).reshape([batch, columns * channels, height * width]), right) for row in range(rows)
    ]
    return sum_over_batch(torch.cat(products, 1)).reshape([rows, columns, channels, outputs]).permute(3, 2, 0, 1)


def deep(x: torch.Tensor, gradient: torch.Tensor, g: Geometry) -> torch.Tensor:
    """For many channels: one product for each row of the kernel, over all images at once."""
    batch, channels = x.shape[:2]
    outputs, height, width = gradient.shape[1:]
    rows, columns = g.kernel
    depth = batch * (height * width)
    wide = torch.cat(_shifted(x.transpose(0, 1), width, g), 0)
    left = gradient.transpose(0, 1).reshape([outputs, depth])
    products = [
        torch.matmul(left, _met_by_row(wide, row, height, g).reshape([columns * channels, depth]).transpose(0, 1)) for row in range(rows)
    ]
    return torch.stack(products, 1).reshape([outputs, rows, columns, channels]).permute(0, 3, 1, 2)


def depthwise(x: torch.Tensor, gradient: torch.Tensor, g: Geometry) -> torch.Tensor:
    """One channel each: the products of all columns of the image with all of the gradient, of which a constant matrix picks and adds the
    pairs that meet in a column of the kernel."""
    batch, channels, _, width = x.shape
    height, columns_out = gradient.shape[2:]
    image = x.transpose(0, 1)
    if g.padding[0]:
        image = aten.constant_pad_nd(image, [0, 0, g.padding[0], g.padding[0]], 0.0)
    right = gradient.transpose(0, 1).reshape([channels, batch * height, columns_out])
    met = torch.arange(columns_out).reshape([1, columns_out, 1]) * g.stride[1] - g.padding[1]
    met = met + torch.arange(g.kernel[1]).reshape([1, 1, g.kernel[1]]) * g.dilation[1]
    picked = (torch.arange(width).reshape([width, 1, 1]) == met).to(x.dtype).reshape([width * columns_out, g.kernel[1]])
    rows = []
    for row in range(g.kernel[0]):
        left = _met_by_row(image, row, height, g).reshape([channels, batch * height, width]).transpose(1, 2)
        rows.append(torch.matmul(torch.matmul(left, right).reshape([channels, width * columns_out]), picked.to(x.device)))
    return torch.stack(rows, 1).reshape([channels, 1, *g.kernel])


def grouped(x: torch.Tensor, gradient: torch.Tensor, g: Geometry) -> torch.Tensor:
    """A batch of products, one for each image and group."""
    batch, channels = x.shape[:2]
    outputs, height, width = gradient.shape[1:]
    inner, outer, area = channels // g.groups, outputs // g.groups, height * width
    pieces = [
        _met_by_row(shifted, row, height, g).reshape([batch, g.groups, inner, area])
        for row in range(g.kernel[0])
        for shifted in _shifted(x, width, g)
    ]
    right = gradient.reshape([batch, g.groups, outer, area]).transpose(2, 3)
    product = sum_over_batch(torch.matmul(torch.cat(pieces, 2), right))
    result = product.reshape([g.groups, g.kernel[0], g.kernel[1], inner, outer]).permute(0, 4, 3, 1, 2)
    return result.reshape([outputs, inner, *g.kernel])
