"""Where gradients are written: flat buffers, reused when nothing references them any more.

PyTorch's AccumulateGrad takes a gradient without copying it, so the gradient of one step may remain some parameter's `.grad`
for any time. The storage's reference count covers every holder: a Parameter, a view, DDP, a saved variable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from ...pytorch_private import counts_tensor_uses, foreach_mul_, storage_uses, tensor_uses
from .memory import Shape, layout

Lease = list[torch.Tensor]
"""Tensors on a buffer's memory; while they live, the buffer is not free."""

POOL_SIZE = 4
"""Buffers kept for reuse; further forwards before a backward allocate new ones."""

_MANY = 8


class GradientBuffer:
    """One flat tensor per element type, the place of each gradient in it, and the IOBinding that writes there.

    Gradients of one shape are adjacent, so that one `unbind` creates all their views: faster than one view each if there are many.
    """

    def __init__(self, gradients: Sequence[tuple[torch.dtype, Shape]], device: torch.device) -> None:
        self.binding: Any = None
        starts, sizes = layout(gradients)
        kinds = list(sizes)
        members: dict[tuple[torch.dtype, Shape], list[int]] = {}
        for index, key in enumerate(gradients):
            members.setdefault(key, []).append(index)
        # Place in which flat tensor: of single gradients, and of groups of gradients of one shape.
        self._single: list[tuple[int, int, Shape, Shape, int]] = []
        self._together: list[tuple[list[int], int, Shape, Shape, int]] = []
        for (dtype, shape), indices in members.items():
            strides, kind = _strides(shape), kinds.index(dtype)
            if len(indices) < _MANY:
                self._single += [(index, kind, shape, strides, starts[index]) for index in indices]
            else:
                first, second, *_ = (starts[index] for index in indices)
                self._together.append((indices, kind, (len(indices), *shape), (second - first, *strides), first))
        self.flats = [torch.zeros(sizes[kind], dtype=kind, device=device) for kind in kinds]
        self.streams: set[int] = set()
        """On CUDA, the streams that are known to use this memory."""
        self._addresses = [flat.data_ptr() for flat in self.flats]
        self._counts = [sum(dtype is kind for dtype, _ in gradients) for kind in kinds]
        self._steady: list[torch.Tensor] | None = None
        self._steady_counts: list[tuple[int, int]] = []
        self._baseline: list[int] = []

    def lease(self) -> Lease:
        return [flat.view(-1) for flat in self.flats]

    def views(self, flats: Sequence[torch.Tensor]) -> list[Any]:
        """The gradients in `flats`, which have this buffer's layout, in the order of the parameters."""
        found: list[Any] = [None] * sum(self._counts)
        for index, kind, shape, strides, start in self._single:
            found[index] = flats[kind].as_strided(shape, strides, start)
        for indices, kind, shape, strides, start in self._together:
            for index, view in zip(indices, flats[kind].as_strided(shape, strides, start).unbind(0), strict=True):
                found[index] = view
        return found

    def steady_views(self) -> list[torch.Tensor]:
        """The gradients as the same tensor objects each time: creating 300 views takes longer than a small model's step."""
        if not counts_tensor_uses():  # whether such an object is in use can't be detected
            return self.views(self.flats)
        if self._steady is None:
            self._steady = self.views(self.flats)
            self._steady_counts = tensor_uses(self._steady)
            self._baseline = [before + views for before, views in zip(self._baseline, self._counts, strict=True)]
        return self._steady

    def drop_steady_views(self) -> None:
        """Mark the views as unused (the buffer was free), so that a step need not check each of them again."""
        if self._steady is not None:
            self._steady.clear()
            self._steady = None
            self._baseline = [before - views for before, views in zip(self._baseline, self._counts, strict=True)]

    def settle(self) -> None:
        """Record the storage's reference count now, while there are no outside references."""
        self._baseline = [storage_uses(flat) for flat in self.flats]

    def moved(self) -> bool:
        """Whether the memory was moved away from where the binding writes: all of it, as `share_memory_` of a gradient
        does, or a steady view's, as `gradient.data = ...` does."""
        if [flat.data_ptr() for flat in self.flats] != self._addresses:
            return True
        return any(storage_uses(flat) < least for flat, least in zip(self.flats, self._baseline, strict=True))

    def free(self) -> bool:
        if [storage_uses(flat) for flat in self.flats] != self._baseline:
            return False
        return self._steady is None or tensor_uses(self._steady) == self._steady_counts


class GradientPool:
    """Returns a free buffer, or creates one."""

    def __init__(self, make: Callable[[], GradientBuffer]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._buffers: list[GradientBuffer] = []

    def take(self) -> tuple[GradientBuffer, Lease]:
        with self._lock:
            self._buffers = [buffer for buffer in self._buffers if not buffer.moved()]
            for buffer in self._buffers:
                if buffer.free():
                    return buffer, buffer.lease()
            buffer = self._make()
            buffer.settle()
            if len(self._buffers) < POOL_SIZE:
                self._buffers.append(buffer)
            return buffer, buffer.lease()

    def owner_of(self, gradients: Any) -> GradientBuffer | None:
        """The buffer whose steady views these are."""
        return next((buffer for buffer in self._buffers if buffer._steady is gradients and not buffer.moved()), None)

    def __len__(self) -> int:
        return len(self._buffers)


def scale(gradients: Sequence[torch.Tensor], grad_loss: torch.Tensor) -> None:
    """Scale the gradients by the loss's gradient. The shortcut for 1 is skipped on GPU to avoid a sync."""
    if grad_loss.device.type != "cpu" or grad_loss.item() != 1.0:
        foreach_mul_(list(gradients), grad_loss.reshape(()))


def spent() -> UnsupportedError:
    return UnsupportedError(
        "trying to backward through the same forward a second time",
        remedy="Pass retain_graph=True to the first backward, or run the model again.",
    )


def refuse_second_derivative(remedy: str) -> None:
    """Raise in a backward with create_graph=True (only then is grad mode on): these gradients have no graph."""
    if torch.is_grad_enabled():
        raise UnsupportedError("create_graph=True: the gradients of this engine can't be differentiated again", remedy=remedy)


def _strides(shape: Shape) -> Shape:
    """Row-major strides."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
