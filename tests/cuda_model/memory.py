"""Device memory: an arena of CPU memory for each device, so that an address tells the device, and an allocator with PyTorch's rule.

A block belongs to the stream it was allocated on. Freed, it is handed out again on that stream at once, last freed first; on no other.
`record_stream` delays that until the host has seen the other stream finish.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from dataclasses import dataclass, field

import numpy as np
import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.utils._python_dispatch import _disable_current_modes

from .machine import Machine, Timeline

ARENA = 1 << 26
_BLOCK = 512


@dataclass
class _Block:
    start: int
    size: int
    stream: Timeline
    recorded: dict[Timeline, int] = field(default_factory=dict)


class Memory:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._arenas = [np.empty(ARENA + _BLOCK, np.uint8) for _ in range(machine.devices)]
        self._starts = [arena.ctypes.data + -arena.ctypes.data % _BLOCK for arena in self._arenas]
        self._used = [0] * machine.devices
        self._free: dict[tuple[Timeline, int], list[_Block]] = {}
        self._live: dict[int, _Block] = {}
        self._lock = threading.RLock()
        self.pinned_addresses: set[int] = set()

    def device_at(self, address: int) -> int | None:
        """The device whose memory it is; None for the host's."""
        for index, start in enumerate(self._starts):
            if start <= address < start + ARENA:
                return index
        return None

    def device_of(self, tensor: torch.Tensor) -> int | None:
        while is_functorch_wrapped_tensor(tensor):  # inside torch.func.grad
            tensor = get_unwrapped(tensor)
        return self.device_at(tensor.untyped_storage().data_ptr())

    def live_bytes(self, device: int) -> int:
        return sum(block.size for block in self._live.values() if block.stream.device == device)

    def allocate(self, nbytes: int, stream: Timeline) -> torch.UntypedStorage:
        assert stream.device is not None
        size = max(_BLOCK, nbytes + -nbytes % _BLOCK)
        with self._lock:
            block = self._reusable(stream, size)
            if block is None:
                start = self._starts[stream.device] + self._used[stream.device]
                self._used[stream.device] += size
                assert self._used[stream.device] <= ARENA, "the model's arena is full"
                block = _Block(start, size, stream)
            self._live[block.start] = block
        first = block.start - self._arenas[stream.device].ctypes.data
        part = self._arenas[stream.device][first : first + max(nbytes, 1)]
        weakref.finalize(part, self._release, block)
        return torch.from_numpy(part).untyped_storage()

    def like(self, value: torch.Tensor, stream: Timeline) -> torch.Tensor:
        """The tensor in device memory: same values, sizes and strides."""
        extent = extent_of(value)
        storage = self.allocate(extent, stream)
        ctypes.memmove(storage.data_ptr(), span(value)[0], extent)
        with _disable_current_modes():
            return torch.empty(0, dtype=value.dtype).set_(storage, 0, value.shape, value.stride())

    def record(self, tensor: torch.Tensor, stream: Timeline) -> None:
        block = self._live.get(tensor.untyped_storage().data_ptr())
        if block is not None and stream is not block.stream:
            block.recorded[stream] = 0

    def _release(self, block: _Block) -> None:
        with self._lock:
            self._live.pop(block.start, None)
            block.recorded = {stream: stream.clock.get(stream, 0) for stream in block.recorded}
            self._free.setdefault((block.stream, block.size), []).append(block)

    def _reusable(self, stream: Timeline, size: int) -> _Block | None:
        known, found = self._free.get((stream, size), []), self._machine.host.clock
        for place in reversed(range(len(known))):
            if all(found.get(other, 0) >= count for other, count in known[place].recorded.items()):
                block = known.pop(place)
                block.recorded = {}
                return block
        return None


def extent_of(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.numel() == 0:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.element_size()


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size(), extent_of(tensor)
