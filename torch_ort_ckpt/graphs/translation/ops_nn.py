"""Convolution, normalisation and dropout."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import Ints, Scalar, register_op


@register_op("Conv")
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Tensor:
    rank = x.dim() - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    pads = resolve_pads(x.shape[2:], weight.shape[2:], auto_pad, pads, strides, dilations)
    if pads[:rank] != pads[rank:]:
        x, pads = pad_spatial(x, pads), [0] * (2 * rank)
    function = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    return function(x, weight, bias, strides, pads[:rank], dilations, group)


def resolve_pads(size: Any, kernel: Any, auto_pad: str, pads: Any, strides: Any, dilations: Any) -> list[int]:
    """Befores then afters. SAME_*: the output has size / stride elements, rounded up, and an odd padding goes where the name says."""
    rank = len(kernel)
    if auto_pad in ("NOTSET", ""):
        return list(pads) if pads is not None else [0] * (2 * rank)
    if auto_pad == "VALID":
        return [0] * (2 * rank)
    before, after = [], []
    for i in range(rank):
        needed = max((-(-size[i] // strides[i]) - 1) * strides[i] + dilations[i] * (kernel[i] - 1) + 1 - size[i], 0)
        less, more = needed // 2, needed - needed // 2
        before.append(less if auto_pad == "SAME_UPPER" else more)
        after.append(more if auto_pad == "SAME_UPPER" else less)
    return before + after


def pad_spatial(x: Tensor, pads: Any, value: float = 0.0) -> Tensor:
    """Pad the spatial axes; `pads` as ONNX has them, befores then afters."""
    rank = len(pads) // 2
    sizes: list[int] = []
    for i in reversed(range(rank)):
        sizes += [pads[i], pads[rank + i]]
    return F.pad(x, sizes, value=value)


@register_op("ConvTranspose")
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    output_padding: Any = None,
    output_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Tensor:
    rank = x.dim() - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    extra = output_padding or [0] * rank
    full = [strides[i] * (x.shape[2 + i] - 1) + extra[i] + (weight.shape[2 + i] - 1) * dilations[i] + 1 for i in range(rank)]
    pads = list(pads) if pads is not None else [0] * (2 * rank)
    wanted = [n * s for n, s in zip(x.shape[2:], strides, strict=True)] if auto_pad.startswith("SAME") else output_shape
    if wanted is not None:
        total = [full[i] - wanted[-rank:][i] for i in range(rank)]
        small = [t // 2 for t in total]
        large = [t - s for t, s in zip(total, small, strict=True)]
        pads = small + large if auto_pad == "SAME_UPPER" else large + small
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    if pads[:rank] == pads[rank:] and min(pads) >= 0 and all(e < max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        return function(x, weight, bias, strides, pads[:rank], extra, group, dilations)
    # Uneven padding: compute without any and cut it off (output padding adds to the far side).
    y = function(x, weight, bias, strides, [0] * rank, [0] * rank, group, dilations)
    cut = [-p for p in pads[:rank]] + [e - p for e, p in zip(extra, pads[rank:], strict=True)]
    if bias is None or all(c <= 0 for c in cut):
        return pad_spatial(y, cut)
    shape = (1, -1, *[1] * rank)
    return pad_spatial(y - bias.reshape(shape), cut) + bias.reshape(shape)


@register_op("BatchNormalization", since=9)
def batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
    spatial: int = 1,
    outputs: int,
) -> Any:
    """As ONNX has it: with `training_mode` (opset 14) the statistics are results, and the variance is the biased one."""
    scale, bias = scale.to(mean.dtype), bias.to(mean.dtype)  # x may be in half precision, and the rest in float32
    if not training_mode:
        return F.batch_norm(x, mean, var, scale, bias, False, 0.0, epsilon)
    y = F.batch_norm(x, None, None, scale, bias, True, 0.0, epsilon)
    if outputs == 1:
        return y
    axes = [0, *range(2, x.dim())]
    batch_var, batch_mean = torch.var_mean(x, axes, correction=0)
    statistics = (mean * momentum + batch_mean * (1 - momentum), var * momentum + batch_var * (1 - momentum))
    return (y, *statistics, batch_mean, batch_var)[:outputs]


@register_op("InstanceNormalization")
def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return F.instance_norm(x, None, None, scale, bias, True, 0.0, epsilon)


@register_op("GroupNormalization", since=21)
def group_norm(x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1) -> Tensor:
    return F.group_norm(x, num_groups, scale, bias, epsilon)


@register_op("GroupNormalization", since=18)
def group_norm_by_group(x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5) -> Tensor:
    """Opset 18 had one scale per group."""
    per_channel = x.shape[1] // num_groups
    return F.group_norm(x, num_groups, scale.repeat_interleave(per_channel), bias.repeat_interleave(per_channel), epsilon)


@register_op("LayerNormalization")
def layer_norm(
    x: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    outputs: int = 1,
) -> Any:
    axis = axis if axis >= 0 else axis + x.dim()
    shape = x.shape[axis:]
    if outputs == 1 and (scale is None or scale.shape == shape) and (bias is None or bias.shape == shape):
        return F.layer_norm(x, shape, scale, bias, epsilon)
    var, mean = torch.var_mean(x, list(range(axis, x.dim())), correction=0, keepdim=True)
    inverse = torch.rsqrt(var + epsilon)
    y = (x - mean) * inverse
    y = y if scale is None else y * scale
    y = y if bias is None else y + bias
    return (y, mean, inverse)[:outputs] if outputs > 1 else y


@register_op("SimplifiedLayerNormalization")
@register_op("RMSNormalization", since=23)
def rms_norm(x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, outputs: int = 1) -> Any:
    axis = axis if axis >= 0 else axis + x.dim()
    inverse = torch.rsqrt((x * x).mean(list(range(axis, x.dim())), keepdim=True) + epsilon)
    y = x * inverse * scale
    return y if outputs == 1 else (y, inverse)


@register_op("LRN")
def local_response_norm(x: Tensor, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int) -> Tensor:
    """ONNX's window leans to the far side for an even size, torch's to the near one: hence our own padding."""
    flat = (x * x).reshape(x.shape[0], 1, x.shape[1], -1)
    padded = F.pad(flat, (0, 0, (size - 1) // 2, size // 2))
    window = F.avg_pool2d(padded, (size, 1), stride=1).reshape(x.shape)
    return x / (bias + alpha * window) ** beta


@register_op("LpNormalization")
def lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    norm = torch.linalg.vector_norm(x, ord=p, dim=axis, keepdim=True)
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


@register_op("MeanVarianceNormalization")
def mean_variance_normalization(x: Tensor, *, axes: Any = (0, 2, 3)) -> Tensor:
    var, mean = torch.var_mean(x, list(axes), correction=0, keepdim=True)
    return (x - mean) / (var.sqrt() + 1e-9)


@register_op("Dropout", since=12)
def dropout(x: Tensor, ratio: Scalar | None = None, training_mode: Scalar | None = None, *, seed: int = 0, outputs: int = 1) -> Any:
    """Random numbers come from torch's generator; a per-node `seed` has no meaning for it."""
    p = 0.5 if ratio is None else float(ratio)
    training = training_mode is not None and bool(training_mode)
    if outputs == 1:
        return F.dropout(x, p, training)
    if not training or p == 0.0:
        return x, torch.ones_like(x, dtype=torch.bool)
    mask = torch.rand_like(x, dtype=torch.float32) >= p
    return x * mask / (1 - p) if p < 1 else torch.zeros_like(x), mask


@register_op("Dropout")
def dropout_for_inference(x: Tensor, *, ratio: float = 0.5, outputs: int = 1) -> Any:
    """Before opset 12 ONNX defines it for inference only."""
    return x if outputs == 1 else (x, torch.ones_like(x, dtype=torch.bool))


@register_op("Bernoulli")
def bernoulli(x: Tensor, *, dtype: torch.dtype | None = None, seed: float | None = None) -> Tensor:
    return torch.bernoulli(x).to(dtype or x.dtype)


@register_op("RandomNormalLike")
def random_normal_like(
    x: Tensor, *, dtype: torch.dtype | None = None, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Tensor:
    return torch.randn_like(x, dtype=dtype) * scale + mean


@register_op("RandomUniformLike")
def random_uniform_like(
    x: Tensor, *, dtype: torch.dtype | None = None, high: float = 1.0, low: float = 0.0, seed: float | None = None
) -> Tensor:
    return torch.rand_like(x, dtype=dtype) * (high - low) + low


@register_op("RandomNormal")
def random_normal(
    *,
    dtype: torch.dtype = torch.float32,
    mean: float = 0.0,
    scale: float = 1.0,
    seed: float | None = None,
    shape: Any,
    device: torch.device,
) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device) * scale + mean


@register_op("RandomUniform")
def random_uniform(
    *,
    dtype: torch.dtype = torch.float32,
    high: float = 1.0,
    low: float = 0.0,
    seed: float | None = None,
    shape: Any,
    device: torch.device,
) -> Tensor:
    return torch.rand(shape, dtype=dtype, device=device) * (high - low) + low


@register_op("Col2Im")
def col2im(x: Tensor, image_shape: Ints, block_shape: Ints, *, dilations: Any = None, pads: Any = None, strides: Any = None) -> Tensor:
    """The blocks added back into an image, for any number of spatial axes."""
    rank = len(block_shape)
    strides, dilations, pads = strides or [1] * rank, dilations or [1] * rank, pads or [0] * (2 * rank)
    channels = x.shape[1] // math.prod(block_shape)
    padded = [image_shape[i] + pads[i] + pads[rank + i] for i in range(rank)]
    counts = [(padded[i] - dilations[i] * (block_shape[i] - 1) - 1) // strides[i] + 1 for i in range(rank)]
    place = torch.zeros((), dtype=torch.int64, device=x.device)
    for i in range(rank):
        taps = torch.arange(block_shape[i], device=x.device) * dilations[i]
        steps = torch.arange(counts[i], device=x.device) * strides[i]
        line = (taps[:, None] + steps[None, :]).reshape(
            [block_shape[i] if k == i else counts[i] if k == rank + i else 1 for k in range(2 * rank)]
        )
        place = place * padded[i] + line
    flat = x.new_zeros(x.shape[0], channels, math.prod(padded))
    flat = flat.index_add(2, place.reshape(-1), x.reshape(x.shape[0], channels, -1))
    return pad_spatial(flat.reshape(x.shape[0], channels, *padded), [-p for p in pads])
