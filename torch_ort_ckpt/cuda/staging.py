"""Copies of device tensors in the host's memory, made while training goes on.

A copy on the device would double its memory. A copy made by the thread that writes would run on that thread's stream, which nothing orders
with the training's. So the caller's stream copies to pinned memory, which does not wait, and records an event; the writer waits for that.
"""

from __future__ import annotations

import torch


class Staging:
    """Copies tensors to the host; `wait` returns when the copies of device tensors have arrived."""

    def __init__(self) -> None:
        self._copied: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._devices: set[torch.device] = set()
        self._events: list[torch.cuda.Event] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's values as they are now, in memory of their own. One tensor given twice is copied once: tied tensors stay tied."""
        if id(tensor) not in self._copied:
            # The original is kept too: its address must not become that of another tensor meanwhile.
            self._copied[id(tensor)] = tensor, self._copy(tensor.detach())
        return self._copied[id(tensor)][1]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cuda":
            return tensor.to("cpu", copy=True)
        self._devices.add(tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def finish(self) -> Staging:
        """Call when all is copied, on the thread and stream of the copies."""
        for device in self._devices:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped; the writer sleeps, not spins
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)
        self._copied.clear()
        return self

    def wait(self) -> None:
        """Call on the thread that reads the copies."""
        for event in self._events:
            event.synchronize()
