"""Locks on files and folders, where the system has them. The system releases a lock when its holder ends, however it ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path


class Lock(Enum):
    """The answer to a request for a lock."""

    HELD = "held by this descriptor now"
    BUSY = "held by another"
    UNSUPPORTED = "this file system or operating system has no locks"


def lock(descriptor: int, *, wait: bool) -> Lock:
    """Lock an open file or folder until the descriptor and its duplicates are closed. With `wait`, the answer is never `BUSY`."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.BUSY
    except (ImportError, OSError):  # Windows, some network file systems
        return Lock.UNSUPPORTED
    return Lock.HELD


@contextlib.contextmanager
def directory_lock(folder: Path) -> Iterator[None]:
    """Lock `folder` against other writers of this library during a short sequence of renames (where the system supports it)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows, or a folder without read permission
        yield
        return
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
