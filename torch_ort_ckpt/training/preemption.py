"""Handling of SIGTERM: finish the step, save, stop. Cluster managers send it some time before SIGKILL. Windows has SIGBREAK besides: the
console sends it for Ctrl+Break, and a parent process to end one that it started in a group of its own."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Preemption:
    """Records the signal while installed. Only the main thread can install handlers; in other threads this does nothing."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers or tuple(getattr(signal, name) for name in ("SIGTERM", "SIGBREAK") if hasattr(signal, name))
        self.requested = False
        self._previous: dict[int, Any] = {}
        self._installed = False

    def install(self) -> None:
        if self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._previous = {number: signal.signal(number, self._note) for number in self.numbers}
        self._installed = True

    def uninstall(self) -> None:
        if self._installed:
            for number, previous in self._previous.items():
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
            self._installed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
