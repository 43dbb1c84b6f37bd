"""Faster forms of batch normalisation in training mode: one operator of ONNX for the forward, two sums and one operator for the backward.

The plain forms are PyTorch's. Layers without running statistics, or without weights, take them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .onnx_operators import affine_by_channel, batch_normalization
from .registry import fast
from .sizes import product

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64)


@fast(aten._native_batch_norm_legit_functional.default)
def native_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Result, mean and 1 / deviation of the batch, new running mean and variance."""
    if not training or weight is None or bias is None or x.dtype not in DTYPES or x.dim() < 3:
        return NotImplemented
    # ONNX Runtime writes mean and variance over these two. They must differ from those of any other layer, also after equal computations
    # were merged, so they are computed from this layer's own statistics; they are finite even if those are not.
    mine, too = torch.isnan(running_mean).to(x.dtype), torch.isnan(running_var).to(x.dtype)
    result, mean, variance = batch_normalization(x, weight, bias, mine, too, eps)
    count = x.shape[0] * product(x.shape[2:])
    unbiased = variance * (count / (count - 1))
    return (
        result,
        mean,
        torch.rsqrt(variance + eps),
        momentum * mean + (1 - momentum) * running_mean,
        momentum * unbiased + (1 - momentum) * running_var,
    )


@fast(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    mean: torch.Tensor | None,
    inverse: torch.Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Of x: g * a - ((x - mean) * b + c), where a, b and c are numbers for each channel."""
    if not train or weight is None or mean is None or inverse is None or x.dtype not in DTYPES or x.dim() < 3:
        return NotImplemented
    axes, shape = [0, *range(2, x.dim())], [1, x.shape[1], *[1] * (x.dim() - 2)]
    count = x.shape[0] * product(x.shape[2:])
    total = gradient.sum(axes)
    with_x = ((x - mean.reshape(shape)) * gradient).sum(axes)
    of_x = None
    if output_mask[0]:
        factor = weight * inverse
        share = factor / count
        of_x = gradient * factor.reshape(shape) - affine_by_channel(x, share * inverse * inverse * with_x, share * total, mean)
    return of_x, with_x * inverse if output_mask[1] else None, total if output_mask[2] else None
