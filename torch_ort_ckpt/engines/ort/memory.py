"""Tensors that are adjacent in memory.

An optimizer graph treats every element alike, so adjacent tensors can be passed to it as one: with many small parameters it
then takes half the time. Parameters, gradients and moments are laid out in the same order for that. Parameters and moments have a storage
of their own each, as `safetensors` and others refuse tensors that share one.

ORT's kernels round differently in the last elements of a tensor that don't fill a vector. For bit-identical results, every tensor starts
at a cache line, and one whose size is not a multiple of it is never followed by another in the same piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import Tensors

Shape = tuple[int, ...]
Piece = tuple[int, int]
"""An address, and how many float32 elements there are."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CACHE_LINE = 64
_LINE = _CACHE_LINE // 4
"""Elements of float32 in it."""


def layout(kinds: Sequence[tuple[torch.dtype, Shape]]) -> tuple[list[int], dict[torch.dtype, int]]:
    """The start of each tensor within the memory for its type, and the size needed for each type (both in elements).

    Tensors of one shape are adjacent, those of whole cache lines come first, the others are followed by padding.
    """
    members: dict[tuple[torch.dtype, Shape], list[int]] = {}
    for index, kind in enumerate(kinds):
        members.setdefault(kind, []).append(index)
    sizes = dict.fromkeys((dtype for dtype, _ in kinds), 0)
    starts = [0] * len(kinds)
    for dtype, shape in sorted(members, key=lambda kind: math.prod(kind[1]) * kind[0].itemsize % _CACHE_LINE != 0):
        for index in members[dtype, shape]:
            starts[index] = sizes[dtype]
            sizes[dtype] = _next_line(sizes[dtype] + math.prod(shape), dtype.itemsize)
    return starts, sizes


def side_by_side(shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Zeros (float32, in CPU memory) as `layout` places them."""
    starts, sizes = layout([(torch.float32, shape) for shape in shapes])
    memory = torch.zeros(sizes.get(torch.float32, 0)).numpy()
    return [torch.from_numpy(memory[start : start + math.prod(shape)].reshape(shape)) for start, shape in zip(starts, shapes, strict=True)]


def zeros_like_all(tensors: Tensors) -> list[torch.Tensor]:
    """Zeros with the same memory layout as the tensors, where these are adjacent."""
    if any(type(tensor) not in _PLAIN or tensor.device.type != "cpu" or tensor.dtype is not torch.float32 for tensor in tensors):
        return [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
    starts, end = {}, 0
    for index in sorted(range(len(tensors)), key=lambda index: tensors[index].data_ptr()):
        starts[index] = end
        end = _next_line(end + tensors[index].numel())
    memory = torch.zeros(end).numpy()
    return [
        torch.from_numpy(memory[starts[index] : starts[index] + tensor.numel()].reshape(tensor.shape))
        for index, tensor in enumerate(tensors)
    ]


def pieces(addresses: Sequence[Sequence[int]], sizes: Sequence[int], *, join: bool) -> list[list[Piece]]:
    """For each list of tensors, given by their addresses (`sizes` are their numbers of elements, the same for all lists): the pieces to
    pass on. With `join`, tensors of whole cache lines are merged with the tensor that follows them in every list."""
    found: list[list[Piece]] = [[] for _ in addresses]
    filled = [index for index, size in enumerate(sizes) if size]
    if not join or not filled:
        return [[(places[index], size) for index, size in enumerate(sizes)] for places in addresses]
    total, ends = 0, [-1] * len(addresses)
    for index in sorted(filled, key=addresses[0].__getitem__):
        starts = [places[index] for places in addresses]
        if starts != ends:
            total = 0
            for own, start in zip(found, starts, strict=True):
                own.append((start, 0))
        total += sizes[index]
        for own in found:
            own[-1] = (own[-1][0], total)
        ends = [start + 4 * sizes[index] if sizes[index] % _LINE == 0 else -1 for start in starts]
    return found


def _next_line(elements: int, itemsize: int = 4) -> int:
    return elements + -elements % (_CACHE_LINE // itemsize)
