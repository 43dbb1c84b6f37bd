"""Where gradients are written: flat buffers, reused when nobody refers to them any more.

PyTorch's AccumulateGrad takes a gradient over instead of copying it, so what was written in one step may be some parameter's `.grad`
for as long as the user likes. The storage's reference count tells, whoever holds it: a Parameter, a view, DDP, a saved variable.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

Shape = tuple[int, ...]
Lease = list[torch.Tensor]
"""Tensors on a buffer's memory; while they live, the buffer is not free."""

POOL_SIZE = 4
"""Buffers kept for reuse; more forwards than that before a backward get buffers of their own."""

_ALIGNMENT = 64


class GradientBuffer:
    """One flat tensor per element type, where each gradient lies in it, and the IOBinding that writes there."""

    def __init__(self, gradients: Sequence[tuple[torch.dtype, Shape]], device: torch.device) -> None:
        self.binding: Any = None
        sizes: dict[torch.dtype, int] = {}
        kinds = list(dict.fromkeys(dtype for dtype, _ in gradients))
        self._places: list[tuple[int, Shape, Shape, int]] = []
        for dtype, shape in gradients:
            strides, count = _strides(shape)
            start, step = sizes.get(dtype, 0), _ALIGNMENT // dtype.itemsize
            self._places.append((kinds.index(dtype), shape, strides, start))
            sizes[dtype] = start + -(-count // step) * step
        self._flats = [torch.zeros(sizes[kind], dtype=kind, device=device) for kind in kinds]
        self._steady: list[torch.Tensor] | None = None
        self._steady_counts: list[tuple[int, int]] = []
        self._baseline: list[int] = []

    def lease(self) -> Lease:
        return [flat.view(-1) for flat in self._flats]

    def views(
        self, flats: Sequence[torch.Tensor], needed: Sequence[bool] | None = None, dtypes: Sequence[torch.dtype] | None = None
    ) -> list[Any]:
        """The gradients in `flats`, which have this buffer's layout; None for those not needed, converted where `dtypes` says so."""
        found: list[Any]
        if needed is None or all(needed):
            found = [flats[kind].as_strided(shape, strides, start) for kind, shape, strides, start in self._places]
        else:
            found = [
                flats[kind].as_strided(shape, strides, start) if wanted else None
                for wanted, (kind, shape, strides, start) in zip(needed, self._places, strict=True)
            ]
        if dtypes is not None:
            return [view if view is None else view.to(dtype) for view, dtype in zip(found, dtypes, strict=True)]
        return found

    def steady_views(self) -> list[torch.Tensor]:
        """The gradients as the same tensor objects each time: making 300 views anew costs more than a small model's step."""
        if not hasattr(torch.Tensor, "_use_count"):  # older PyTorch can't tell whether such an object is in use
            return self.views(self._flats)
        if self._steady is None:
            self._steady = self.views(self._flats)
            self._steady_counts = _counts(self._steady)
            self._baseline = [count + len([1 for place in self._places if place[0] == kind]) for kind, count in enumerate(self._baseline)]
        return list(self._steady)

    def settle(self) -> None:
        """Remember how often the memory is referred to now, when nobody outside does."""
        self._baseline = [_use_count(flat) for flat in self._flats]

    def free(self) -> bool:
        if [_use_count(flat) for flat in self._flats] != self._baseline:
            return False
        return self._steady is None or _counts(self._steady) == self._steady_counts


class GradientPool:
    """Hands out a free buffer, or makes one."""

    def __init__(self, make: Callable[[], GradientBuffer]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._buffers: list[GradientBuffer] = []

    def take(self) -> tuple[GradientBuffer, Lease]:
        with self._lock:
            for buffer in self._buffers:
                if buffer.free():
                    return buffer, buffer.lease()
            buffer = self._make()
            buffer.settle()
            if len(self._buffers) < POOL_SIZE:
                self._buffers.append(buffer)
            return buffer, buffer.lease()

    def __len__(self) -> int:
        return len(self._buffers)


def _use_count(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _counts(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(sys.getrefcount(tensor), tensor._use_count()) for tensor in tensors]  # type: ignore[attr-defined]


def _strides(shape: Shape) -> tuple[Shape, int]:
    """Row-major strides, and the number of elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides)), step
