"""Moving elements: reshaping, slicing, joining, indexing, padding, casting and filling."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import Ints, Scalar, register_op


@register_op("Reshape")
def reshape(x: Tensor, shape: Ints, *, allowzero: int = 0) -> Tensor:
    """0 keeps the dimension of the input, unless `allowzero` (opset 14)."""
    if not allowzero and 0 in shape:
        shape = [x.shape[i] if size == 0 else size for i, size in enumerate(shape)]
    return x.reshape(tuple(shape))


@register_op("Flatten")
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    rows = 1
    for size in x.shape[: axis if axis >= 0 else axis + x.dim()]:
        rows = rows * size
    return x.reshape(rows, -1) if x.numel() else x.reshape(rows, x.numel() // rows if rows else 0)


@register_op("Transpose")
def transpose(x: Tensor, *, perm: Any = None) -> Tensor:
    return x.permute(perm if perm is not None else tuple(range(x.dim() - 1, -1, -1)))


@register_op("Squeeze")
def squeeze(x: Tensor, axes: Ints | None = None) -> Tensor:
    """`axes` is an attribute before opset 13 and an input since."""
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


@register_op("Unsqueeze")
def unsqueeze(x: Tensor, axes: Ints) -> Tensor:
    """`axes` count in the output; an attribute before opset 13 and an input since."""
    axes = [axes] if isinstance(axes, int) else axes
    rank = x.dim() + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


@register_op("Expand")
def expand(x: Tensor, shape: Ints) -> Tensor:
    """Broadcasting both ways: a 1 in `shape` keeps the input's size."""
    rank = max(x.dim(), len(shape))
    sizes = [1] * (rank - len(shape)) + list(shape)
    own = [1] * (rank - x.dim()) + list(x.shape)
    return x.expand([a if b == 1 else b for a, b in zip(own, sizes, strict=True)])


@register_op("Tile")
def tile(x: Tensor, repeats: Ints) -> Tensor:
    return x.repeat(tuple(repeats))


@register_op("Concat")
def concat(*values: Tensor, axis: int) -> Tensor:
    return torch.cat(values, axis)


@register_op("Split")
def split(x: Tensor, split: Ints | None = None, *, axis: int = 0, num_outputs: int | None = None, outputs: int) -> Any:
    """The sizes are an attribute before opset 13 and an input since; without them the parts are equal, the last one shorter."""
    if split is None:
        count = num_outputs or outputs
        split = [-(-x.shape[axis] // count)] * (count - 1)
        split = [*split, x.shape[axis] - sum(split)]
    parts = torch.split(x, list(split), axis)
    return parts[0] if outputs == 1 else parts


@register_op("Slice")
def slice_tensor(x: Tensor, starts: Ints, ends: Ints, axes: Ints | None = None, steps: Ints | None = None) -> Tensor:
    """All but the tensor are attributes before opset 10 and inputs since."""
    places: list[Any] = [slice(None)] * x.dim()
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = (axes[i] if axes is not None else i) % x.dim()
        step = steps[i] if steps is not None else 1
        if step > 0:
            places[axis] = slice(start, end, step)
        else:  # torch has no negative steps
            x = x.index_select(axis, _backwards(x, axis, start, end, step))
    return x[tuple(places)]


def _backwards(x: Tensor, axis: int, start: int, end: int, step: int) -> Tensor:
    size = x.shape[axis]
    first = min(max(start + size if start < 0 else start, 0), size - 1)
    last = min(max(end + size if end < 0 else end, -1), size - 1)
    return torch.arange(first, last, step, device=x.device) if first > last else torch.empty(0, dtype=torch.int64, device=x.device)


@register_op("Gather")
def gather(x: Tensor, indices: Scalar, *, axis: int = 0, padding_idx: int | None = None) -> Tensor:
    """Negative indices count from the end. The row `padding_idx` of an embedding takes no gradient."""
    if isinstance(indices, int):
        return x.select(axis, indices)
    if indices.dtype not in (torch.int64, torch.int32):
        indices = indices.long()
    indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    if axis == 0 and x.dim() == 2 and x.is_floating_point():
        return F.embedding(indices, x, padding_idx)  # its backward is much faster than that of indexing
    axis %= x.dim()
    return x.index_select(axis, indices.reshape(-1)).reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


@register_op("GatherElements")
def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return torch.gather(x, axis, torch.where(indices < 0, indices + x.shape[axis], indices).long())


@register_op("GatherND")
def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    places = [torch.where(i < 0, i + x.shape[batch_dims + k], i) for k, i in enumerate(indices.long().unbind(-1))]
    lead = []
    for dim in range(batch_dims):
        shape = [1] * places[0].dim()
        shape[dim] = x.shape[dim]
        lead.append(torch.arange(x.shape[dim], device=x.device).reshape(shape))
    index = (*lead, *places)
    return x[index]


@register_op("Scatter")
@register_op("ScatterElements")
def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    places = torch.where(indices < 0, indices + x.shape[axis], indices).long()
    if reduction == "none":
        return x.scatter(axis, places, updates)
    name = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[reduction]
    return x.scatter_reduce(axis, places, updates, reduce=name, include_self=True)


@register_op("ScatterND")
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    places = tuple(indices.long().unbind(-1))
    if reduction in ("none", "add"):
        return x.index_put(places, updates, accumulate=reduction == "add")
    flat = torch.arange(x.numel(), device=x.device).reshape(x.shape)[places]
    name = {"mul": "prod", "max": "amax", "min": "amin"}[reduction]
    return x.reshape(-1).scatter_reduce(0, flat.reshape(-1), updates.reshape(-1), reduce=name).reshape(x.shape)


@register_op("Pad")
def pad(x: Tensor, pads: Ints, value: Scalar | None = None, axes: Ints | None = None, *, mode: str = "constant") -> Tensor:
    """`pads`: all the befores, then all the afters; an attribute before opset 11 and an input since. Negative ones crop."""
    places = [a % x.dim() for a in axes] if axes is not None else list(range(x.dim()))
    before, after = pads[: len(places)], pads[len(places) :]
    if mode == "constant":
        sizes = [0] * (2 * x.dim())
        for axis, low, high in zip(places, before, after, strict=True):
            sizes[2 * (x.dim() - 1 - axis)], sizes[2 * (x.dim() - 1 - axis) + 1] = low, high
        return F.pad(x, sizes, value=0 if value is None else float(value) if x.is_floating_point() else int(value))
    for axis, low, high in zip(places, before, after, strict=True):
        if low or high:
            x = x.index_select(axis, _reflected(x.shape[axis], low, high, mode, x.device))
    return x


def _reflected(size: int, low: int, high: int, mode: str, device: torch.device) -> Tensor:
    """Which elements of an axis stand where once it is padded."""
    places = torch.arange(-low, size + high, device=device)
    if mode == "edge":
        return places.clamp(0, size - 1)
    if mode == "wrap":
        return places % size
    period = max(2 * size - 2, 1)
    folded = places % period
    return torch.where(folded < size, folded, period - folded)


@register_op("Cast")
def cast(x: Tensor, *, to: torch.dtype, saturate: int = 1, round_mode: str = "up") -> Tensor:
    if to.is_floating_point and to.itemsize == 1 and x.is_floating_point():
        return _to_float8(x, to, bool(saturate))
    return x.to(to)


def _to_float8(x: Tensor, to: torch.dtype, saturate: bool) -> Tensor:
    """What is too large becomes the largest number, or else NaN or infinity; torch does one or the other, by type."""
    largest = torch.finfo(to).max
    if saturate:
        return x.clamp(-largest, largest).to(to)
    if to == torch.float8_e4m3fn:
        x = torch.where(x.abs() > 464.0, torch.nan, x)  # half way to the number after the largest, 448
    return x.to(to)


@register_op("CastLike")
def cast_like(x: Tensor, like: Tensor, *, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return cast(x, to=like.dtype, saturate=saturate)


@register_op("Shape")
def shape_of(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(x.shape[start:end], device=x.device)


@register_op("Size")
def size_of(x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), device=x.device)


@register_op("ConstantOfShape")
def constant_of_shape(shape: Ints, *, value: Any = 0.0, value_dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    return torch.full(tuple(shape), value, dtype=value_dtype, device=device)


@register_op("Range")
def arange(start: Scalar, limit: Scalar, delta: Scalar, *, number_dtype: torch.dtype | None = None, device: torch.device) -> Tensor:
    dtype = start.dtype if isinstance(start, Tensor) else number_dtype
    first, last, step = (v.item() if isinstance(v, Tensor) else v for v in (start, limit, delta))
    return torch.arange(first, last, step, dtype=dtype, device=device)


@register_op("EyeLike")
def eye_like(x: Tensor, *, dtype: torch.dtype | None = None, k: int = 0) -> Tensor:
    return torch.diagonal_scatter(torch.zeros_like(x, dtype=dtype), torch.ones_like(torch.diagonal(x, k), dtype=dtype or x.dtype), k)


@register_op("Trilu")
def trilu(x: Tensor, k: Ints | None = None, *, upper: int = 1) -> Tensor:
    diagonal = k if isinstance(k, int) else k[0] if k else 0
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


@register_op("OneHot")
def one_hot(indices: Tensor, depth: Scalar, values: Tensor, *, axis: int = -1) -> Tensor:
    count = int(depth)
    places = torch.where(indices < 0, indices + count, indices)
    axis = axis if axis >= 0 else axis + indices.dim() + 1
    shape = [1] * (indices.dim() + 1)
    shape[axis] = count
    hot = places.unsqueeze(axis) == torch.arange(count, device=indices.device).reshape(shape)
    return torch.where(hot, values[1], values[0])


@register_op("NonZero")
def non_zero(x: Tensor) -> Tensor:
    return torch.nonzero(x).t() if x.dim() else torch.nonzero(x.reshape(1)).t()[:0]


@register_op("Compress")
def compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    x = x.reshape(-1) if axis is None else x
    axis = axis or 0
    return x.index_select(axis, torch.nonzero(condition[: x.shape[axis]]).reshape(-1))


@register_op("DepthToSpace")
def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    n, c, h, w = x.shape
    parts = x.reshape(n, blocksize, blocksize, c // blocksize**2, h, w)
    return parts.permute(0, 3, 4, 1, 5, 2).reshape(n, c // blocksize**2, h * blocksize, w * blocksize)


@register_op("SpaceToDepth")
def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return parts.permute(order).reshape(n, c * blocksize**2, h // blocksize, w // blocksize)


@register_op("ReverseSequence")
def reverse_sequence(x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    times = torch.arange(x.shape[time_axis], device=x.device)
    ends = lengths.long().unsqueeze(1)
    places = torch.where(times < ends, ends - 1 - times, times)  # [batch, time]
    places = places.t() if time_axis < batch_axis else places
    places = places.reshape(*places.shape, *[1] * (x.dim() - 2)).expand(x.shape)
    return torch.gather(x, time_axis, places)
