"""Reductions, ArgMax/ArgMin and TopK.

`axes` is an attribute before opset 18 (13 for ReduceSum) and an input since: one function serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .registry import Ints, register_op


def _dims(x: Tensor, axes: Any, noop_with_empty_axes: int) -> tuple[int, ...] | None:
    """The axes to reduce: all of them if none is given, or none at all (None) where `noop_with_empty_axes` says so."""
    if axes is not None and len(axes) > 0:
        return tuple(axes)
    return None if noop_with_empty_axes else tuple(range(x.dim()))


@register_op("ReduceSum")
def reduce_sum(x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    dims = _dims(x, axes, noop_with_empty_axes)
    return x if dims is None else x.sum(dims, keepdim=bool(keepdims), dtype=x.dtype)


@register_op("ReduceMean")
def reduce_mean(x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    dims = _dims(x, axes, noop_with_empty_axes)
    if dims is None:
        return x
    return x.mean(dims, keepdim=bool(keepdims)) if x.is_floating_point() else x.double().mean(dims, keepdim=bool(keepdims)).to(x.dtype)


@register_op("ReduceMax")
def reduce_max(x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    dims = _dims(x, axes, noop_with_empty_axes)
    if dims is None:
        return x
    return torch.amax(x, dims, keepdim=bool(keepdims)) if x.numel() else _of_nothing(x, dims, keepdims, -torch.inf)


@register_op("ReduceMin")
def reduce_min(x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    dims = _dims(x, axes, noop_with_empty_axes)
    if dims is None:
        return x
    return torch.amin(x, dims, keepdim=bool(keepdims)) if x.numel() else _of_nothing(x, dims, keepdims, torch.inf)


@register_op("ReduceProd")
def reduce_prod(x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    dims = _dims(x, axes, noop_with_empty_axes)
    if dims is None:
        return x
    for dim in sorted((d % x.dim() for d in dims), reverse=True):
        x = x.prod(dim, keepdim=bool(keepdims), dtype=x.dtype)
    return x


@register_op("ReduceL1")
def reduce_l1(x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    return reduce_sum(x.abs(), axes, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes)


@register_op("ReduceL2")
def reduce_l2(x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    return reduce_sum(x * x, axes, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes).sqrt()


@register_op("ReduceSumSquare")
def reduce_sum_square(x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    return reduce_sum(x * x, axes, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes)


@register_op("ReduceLogSum")
def reduce_log_sum(x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    return reduce_sum(x, axes, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes).log()


@register_op("ReduceLogSumExp")
def reduce_log_sum_exp(x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    dims = _dims(x, axes, noop_with_empty_axes)
    return x if dims is None else torch.logsumexp(x, dims, keepdim=bool(keepdims))


@register_op("ArgMax")
def arg_max(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return _arg(torch.argmax, x, axis, keepdims, select_last_index)


@register_op("ArgMin")
def arg_min(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return _arg(torch.argmin, x, axis, keepdims, select_last_index)


@register_op("TopK")
def top_k(x: Tensor, k: Ints | None = None, *, axis: int = -1, largest: int = 1, sorted: int = 1, outputs: int = 2) -> Any:
    """The first of equal values comes first, as ONNX wants, hence a stable sort."""
    count = k if isinstance(k, int) else k[0]  # type: ignore[index]  # before opset 10 an attribute, an int; since then an input of one
    values, indices = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    values, indices = values.narrow(axis, 0, count), indices.narrow(axis, 0, count)
    return values if outputs == 1 else (values, indices)


def _arg(function: Callable[..., Tensor], x: Tensor, axis: int, keepdims: int, select_last_index: int) -> Tensor:
    if not select_last_index:
        return function(x, axis, keepdim=bool(keepdims))
    return x.shape[axis] - 1 - function(x.flip(axis), axis, keepdim=bool(keepdims))


def _of_nothing(x: Tensor, dims: tuple[int, ...], keepdims: int, value: float) -> Tensor:
    """The maximum or minimum over an empty axis: the identity of the type."""
    if not x.is_floating_point():
        limits = (0, 1) if x.dtype == torch.bool else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
        value = limits[0] if value < 0 else limits[1]
    return torch.full_like(x.sum(dims, keepdim=bool(keepdims)), value, dtype=x.dtype)
