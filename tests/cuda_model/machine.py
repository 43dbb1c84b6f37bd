"""Streams, events and host threads with vector clocks, and the check that conflicting accesses are ordered."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

LINE = 64
"""Bytes that are checked together. Tensors in the arena start at such a boundary."""


class Race(AssertionError):
    """Two accesses to the same memory, at least one of them a write, that nothing orders."""


class Mixed(AssertionError):
    """An operator on tensors of different devices."""


@dataclass(eq=False)
class Timeline:
    """A stream, or a thread of the host: what it does happens in order. `clock` holds what is known to have happened before."""

    name: str
    device: int | None = None
    handle: int = -1
    clock: dict[Timeline, int] = field(default_factory=dict, repr=False)

    def tick(self) -> int:
        count = self.clock.get(self, 0) + 1
        self.clock[self] = count
        return count

    def join(self, clock: dict[Timeline, int]) -> None:
        for other, count in clock.items():
            if count > self.clock.get(other, 0):
                self.clock[other] = count


@dataclass
class _Cell:
    """The last write of a line of memory, and the reads since."""

    writer: tuple[Timeline, int, str] | None = None
    readers: dict[Timeline, tuple[int, str]] = field(default_factory=dict)


class Machine:
    """A host with some GPUs."""

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self._handles = itertools.count(0x5000)
        self.defaults = [Timeline(f"cuda:{index} default stream", index, 0) for index in range(devices)]
        self.by_handle: dict[int, Timeline] = {}
        self.waits: list[str] = []
        """Every time the host waited for a device, and for what."""
        self.pinned_bytes = 0
        """Staging buffers that ORT frees only in a run that synchronises."""
        self.capturing = False
        self.refuses_waits = False
        """`torch.cuda.set_sync_debug_mode("error")`: PyTorch's own waits fail. Those of ONNX Runtime it does not see."""
        self.deferred: list[tuple[Timeline, int, Callable[[], None]]] = []
        """Copies to pinned memory: what the host sees of them before it waits is nothing."""
        self._cells: dict[int, _Cell] = {}
        self._local = threading.local()
        self._lock = threading.RLock()

    # what a thread of the host has

    @property
    def host(self) -> Timeline:
        if not hasattr(self._local, "host"):
            self._local.host = Timeline(f"host thread {threading.current_thread().name}")
        found: Timeline = self._local.host
        return found

    @property
    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def set_device(self, index: int) -> None:
        self._local.device = index

    def current_stream(self, device: int) -> Timeline:
        chosen: dict[int, Timeline] = getattr(self._local, "streams", {})
        return chosen.get(device, self.defaults[device])

    @contextlib.contextmanager
    def using(self, stream: Timeline) -> Iterator[None]:
        """As `torch.cuda.stream`: also the device of the stream is current."""
        assert stream.device is not None
        if not hasattr(self._local, "streams"):
            self._local.streams = {}
        before, device = self._local.streams.get(stream.device), self.current_device
        self._local.streams[stream.device] = stream
        self.set_device(stream.device)
        try:
            yield
        finally:
            self.set_device(device)
            if before is None:
                self._local.streams.pop(stream.device)
            else:
                self._local.streams[stream.device] = before

    # streams

    def new_stream(self, device: int, name: str) -> Timeline:
        stream = Timeline(f"cuda:{device} {name}", device, next(self._handles))
        self.by_handle[stream.handle] = stream
        return stream

    def launch(self, stream: Timeline, reads: list[tuple[int, int]], writes: list[tuple[int, int]], what: str) -> None:
        """Work on a stream, with the memory (start, bytes) that it reads and writes."""
        with self._lock:
            stream.join(self.host.clock)
            count = stream.tick()
            for start, size in reads:
                self._access(stream, count, start, size, False, what)
            for start, size in writes:
                self._access(stream, count, start, size, True, what)

    def wait(self, stream: Timeline, why: str) -> None:
        """The host waits for a stream."""
        with self._lock:
            self.waits.append(why)
            self.host.join(stream.clock)
            self.arrive()

    def arrive(self) -> None:
        """Complete the copies to pinned memory that this thread has waited for."""
        with self._lock:
            rest = []
            for stream, count, complete in self.deferred:
                if self.host.clock.get(stream, 0) >= count:
                    complete()
                else:
                    rest.append((stream, count, complete))
            self.deferred = rest

    def _access(self, stream: Timeline, count: int, start: int, size: int, write: bool, what: str) -> None:
        for line in range(start // LINE, -(-(start + max(size, 1)) // LINE)):
            cell = self._cells.setdefault(line, _Cell())
            if cell.writer is not None and stream.clock.get(cell.writer[0], 0) < cell.writer[1]:
                raise Race(
                    f"{what} on {stream.name} {'writes' if write else 'reads'} what {cell.writer[2]} on {cell.writer[0].name} writes"
                )
            if not write:
                cell.readers[stream] = count, what
                continue
            for reader, (number, reading) in cell.readers.items():
                if stream.clock.get(reader, 0) < number:
                    raise Race(f"{what} on {stream.name} writes what {reading} on {reader.name} reads")
            cell.writer, cell.readers = (stream, count, what), {}


def index_of(device: Any, machine: Machine) -> int:
    """The index of a CUDA device as `torch.cuda`'s functions take it: None, a number, a name or a device."""
    if device is None:
        return machine.current_device
    if isinstance(device, int):
        return device
    found = torch.device(device)
    return found.index if found.index is not None else machine.current_device
