"""The order of ONNX Runtime's work and PyTorch's, without waiting for the device.

ONNX Runtime takes the stream handle 0 for "none given" and then makes a stream that nothing orders with PyTorch's. 0 is PyTorch's default
stream. So each engine has a stream of its own (never 0), and events order it with the caller's.

Memory adds to that. A gradient buffer, or an output from ONNX Runtime's arena, is used again as soon as Python has dropped it, though a
stream may still be reading it. So a run waits for every stream that got results of earlier runs, not for the current one alone, and only
what was unused before that wait is used again after it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from ..errors import UnsupportedError
from ..pytorch_private import storage_uses

_LOOKED_AT = 64
"""How many lent results a run looks at: the newest of those still in use, and as many of the older ones. A loop may collect thousands of
losses."""


class Lane:
    """The stream on which one engine, or one optimizer, runs its graphs, one at a time.

    One at a time, for with a stream that it was given ONNX Runtime uses the cuBLAS and cuDNN handles of the thread that made the session in
    every thread, and a cuDNN handle must not be used by two threads at once. Launching takes little time; the work itself does not hold
    the lock.
    """

    def __init__(self, device: torch.device, otherwise: str) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._otherwise = otherwise
        self._served: dict[int, torch.cuda.Stream] = {}
        self._lent: list[torch.Tensor] = []
        self._kept: deque[torch.Tensor] = deque()
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def current_device(self) -> Iterator[None]:
        """For creating sessions, binding, running, and letting sessions go (freeing memory): each of them sets the current device of CUDA
        and never sets it back."""
        with torch.cuda.device(self.device):
            yield

    def refuse_capture(self) -> None:
        """Call before anything is allocated: memory allocated during a capture belongs to the captured graph."""
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "ONNX Runtime's work can't be captured into a CUDA graph: it runs on a stream of its own", remedy=self._otherwise
            )

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """Everything inside comes after the caller's work so far, and before what the caller does next; also if it fails."""
        self.refuse_capture()
        now = torch.cuda.current_stream(self.device)
        with self._lock:
            unused = self._take_unused()
            self._served.setdefault(now.cuda_stream, now)
            for stream in self._served.values():
                self.stream.wait_stream(stream)
            del unused  # from here on ONNX Runtime may use this memory again: its work comes after the waits
            try:
                # PyTorch's own work inside (copies of inputs, half-precision aliases) is on the same stream as the run that reads it.
                with self.current_device(), torch.cuda.stream(self.stream):
                    yield
            finally:
                now.wait_stream(self.stream)

    def lend(self, results: Sequence[torch.Tensor]) -> None:
        """Keep results of ONNX Runtime's arena until the next run finds them unused: it must first wait for those who read them."""
        if _uses_when_alone() is not None:
            with self._lock:
                self._lent += [result.detach() for result in results]

    def share(self, tensors: Sequence[torch.Tensor], known: set[int]) -> None:
        """Tell PyTorch's allocator that this stream and the caller's use the memory too (once for each stream, which `known` remembers).
        Else, once freed, it is used again at once on the stream it was allocated on, whatever the others still do with it."""
        for stream in (self.stream, torch.cuda.current_stream(self.device)):
            if stream.cuda_stream not in known:
                known.add(stream.cuda_stream)
                for tensor in tensors:
                    tensor.record_stream(stream)

    def _take_unused(self) -> list[torch.Tensor]:
        """Lent results that only this lane has. Of those that the user keeps, some are looked at in turn."""
        alone = _uses_when_alone()
        unused: list[torch.Tensor] = []
        used: list[torch.Tensor] = []
        for result in self._lent:
            (unused if storage_uses(result) == alone else used).append(result)
        for _ in range(min(_LOOKED_AT, len(self._kept))):
            result = self._kept.popleft()
            (unused if storage_uses(result) == alone else self._kept).append(result)
        self._kept.extend(used[:-_LOOKED_AT])
        self._lent = used[-_LOOKED_AT:]
        return unused


@functools.cache
def _uses_when_alone() -> int | None:
    """How often a storage is referred to that one tensor has; None where this PyTorch can't tell."""
    probe = torch.zeros(1)
    count = storage_uses(probe)
    return count if storage_uses(probe) == count else None
