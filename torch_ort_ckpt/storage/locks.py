"""Locks on files and folders, where the system has them. The system releases a lock when its holder ends, however it ends.

`flock` where there is `fcntl`. On Windows `msvcrt.locking`: a byte that no reader asks for is locked, since others can't read locked bytes
there; and for a folder, which can't be opened there, a file in it, which the last one to hold it deletes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from .system import is_windows

LOCK_FILE = ".torch-ort-ckpt.lock"
"""In a folder that is locked, on Windows."""


class Lock(Enum):
    """The answer to a request for a lock."""

    HELD = "held by this descriptor now"
    BUSY = "held by another"
    UNSUPPORTED = "this file system or operating system has no locks"


def lock(descriptor: int, *, wait: bool) -> Lock:
    """Lock an open file or folder until the descriptor and its duplicates are closed. With `wait`, the answer is never `BUSY`."""
    if is_windows():
        return _lock_byte(descriptor, wait)
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.BUSY
    except OSError:  # some network file systems
        return Lock.UNSUPPORTED
    return Lock.HELD


_POSITION = 0x7FFFFFFE
"""The last byte that every release of the C library can lock."""
_PAUSE = 0.01


def _lock_byte(descriptor: int, wait: bool) -> Lock:
    try:
        import msvcrt
    except ImportError:
        return Lock.UNSUPPORTED
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        while True:
            os.lseek(descriptor, _POSITION, os.SEEK_SET)
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
                return Lock.HELD
            except PermissionError:
                if not wait:
                    return Lock.BUSY
                time.sleep(_PAUSE)  # LK_LOCK itself gives up after ten seconds
            except OSError:
                return Lock.UNSUPPORTED
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)


_held = threading.local()


@contextlib.contextmanager
def directory_lock(folder: Path) -> Iterator[None]:
    """Lock `folder` against other writers of this library during a short sequence of renames (where the system supports it). A thread
    that holds it may ask again."""
    held: set[str] = _held.__dict__.setdefault("folders", set())
    name = os.path.realpath(folder)
    if name in held:
        yield
        return
    with _lock_file(folder) if is_windows() else _locked_folder(folder):
        held.add(name)
        try:
            yield
        finally:
            held.discard(name)


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # a folder without read permission
        yield
        return
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


@contextlib.contextmanager
def _lock_file(folder: Path) -> Iterator[None]:
    place = folder / LOCK_FILE
    descriptor = _opened(place)
    if descriptor is None:  # a folder without write permission
        yield
        return
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        remove_lock_file(folder)  # refused while another has it open, who will delete it


def remove_lock_file(folder: Path) -> None:
    """Delete what a holder could not, because another program had it open. Refused, rightly, while someone holds it."""
    if is_windows():
        with contextlib.suppress(OSError):
            os.unlink(folder / LOCK_FILE)


def _opened(place: Path) -> int | None:
    for _ in range(100):
        try:
            return os.open(place, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        except PermissionError:  # being deleted by its last holder
            time.sleep(_PAUSE)
        except OSError:
            return None
    return None
