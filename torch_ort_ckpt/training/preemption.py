"""Handling of SIGTERM: finish the step, save, stop. Cluster managers send it some time before SIGKILL."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Preemption:
    """Records the signal while installed. Only the main thread can install handlers; in other threads this does nothing."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self.number = number
        self.requested = False
        self._previous: Any = None
        self._installed = False

    def install(self) -> None:
        if self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.signal(self.number, self._note)
        self._installed = True

    def uninstall(self) -> None:
        if self._installed:
            signal.signal(self.number, self._previous if self._previous is not None else signal.SIG_DFL)
            self._installed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
