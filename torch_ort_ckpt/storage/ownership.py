"""Proof that a folder is ours: a marker file, written before anything else and deleted after everything else.

Folders of this library are found by their names, but names prove nothing: a user may have a `checkpoint_1` too. Only a folder with a
marker for its name is ever deleted or replaced. While a folder is being written, its writer also holds a lock on the marker.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from .files import create_file
from .locks import Lock, directory_lock, lock
from .system import is_windows

MARKER = ".torch-ort-ckpt"
_HEAD = "Made by torch-ort-ckpt, which deletes this folder when it is no longer needed."
_LONGEST = 4096
IDENTITY = r"(?:\d+-)?[0-9a-f]{8}"
"""The id in the names of temporary folders: a random number (in the first releases, after the writer's process id)."""


class Writer(Enum):
    """What is known about the writer of a marked folder."""

    ALIVE = "holds the lock"
    GONE = "nobody holds it"
    UNKNOWN = "this file system or operating system has no locks"


_WRITERS = {Lock.HELD: Writer.GONE, Lock.BUSY: Writer.ALIVE, Lock.UNSUPPORTED: Writer.UNKNOWN}


class MarkedFolder:
    """A new folder `.<target>.<identity>.<suffix>` next to `target`, with a marker that the writer holds a lock on."""

    def __init__(self, target: Path, suffix: str) -> None:
        while True:
            self.identity = new_identity()
            self.path = target.with_name(f".{target.name}.{self.identity}.{suffix}")
            os.mkdir(self.path)
            try:
                self._lock = write_marker(self.path, target.name, self.identity)
            except FileNotFoundError:  # another process removed it as abandoned before it was marked and locked
                continue
            except OSError:
                delete_folder(self.path)
                raise
            return

    def close(self) -> None:
        """Release the lock. Windows renames no folder that contains an open file: there it is released before the rename, under the lock
        of the folder around it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def new_identity() -> str:
    return secrets.token_hex(4)


def write_marker(folder: Path, name: str, identity: str) -> BinaryIO | None:
    """Mark `folder` as made for the name `name`. Returns the open, locked marker, or None (and closes it) without lock support."""
    file = create_file(folder / MARKER)
    held = False
    try:
        locked = lock(file.fileno(), wait=True) is Lock.HELD
        file.write(_text(name, identity).encode("utf-8", "surrogateescape"))
        if not os.fstat(file.fileno()).st_nlink:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        held = locked
    finally:
        if not held:
            file.close()
    return file if held else None


def identity_of(folder: Path, name: str | None = None) -> str | None:
    """The identity in the folder's marker; None without a marker, or if it is for another name."""
    lines = _read(folder).split("\n", 2)
    if len(lines) != 3 or lines[0] != _HEAD or not re.fullmatch(IDENTITY, lines[1]) or name not in (None, lines[2]):
        return None
    return lines[1]


@contextlib.contextmanager
def writer_of(folder: Path) -> Iterator[Writer]:
    """Whether the writer of a marked folder is alive. If it is not, the lock is held during this block (but on Windows, where no folder
    can be renamed or deleted that contains an open file)."""
    try:
        descriptor = os.open(folder / MARKER, os.O_RDWR | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        yield Writer.UNKNOWN
        return
    state = _WRITERS[lock(descriptor, wait=False)]
    if state is not Writer.GONE or is_windows():
        os.close(descriptor)
        yield state
        return
    try:
        yield state
    finally:
        os.close(descriptor)


def delete_abandoned(folder: Path, name: str, partner: Path | None = None) -> None:
    """Delete a temporary folder made for `name` if its writer is gone. The other folder that its marker covers is deleted first.

    A folder without a marker is deleted only if it is empty.
    """
    if delete_if_empty(folder):
        return
    with directory_lock(folder.parent) if is_windows() else contextlib.nullcontext(), writer_of(folder) as writer:
        if writer is not Writer.GONE:
            return
        if identity_of(folder, name) is not None:
            if partner is not None:
                delete_folder(partner)
            delete_folder(folder)
        elif _is_unmarked(folder, name):
            delete_folder(folder)


def delete_if_empty(folder: Path) -> bool:
    """Delete a folder if it is empty; returns whether it was."""
    try:
        if os.listdir(folder):
            return False
        os.rmdir(folder)
    except OSError:
        return False
    return True


def delete_folder(folder: Path, last: str = MARKER) -> None:
    """Delete a folder that is known to be ours. `last`, the proof of that, is deleted last, so that an interrupted deletion can resume."""
    with contextlib.suppress(OSError):
        if not _is_folder(folder):
            return
        for name in sorted(os.listdir(folder), key=lambda name: name == last):
            place = folder / name
            if stat.S_ISDIR(os.lstat(place).st_mode):
                shutil.rmtree(place)
            else:
                os.unlink(place)
        os.rmdir(folder)


def _is_unmarked(folder: Path, name: str) -> bool:
    """Whether the folder holds only an empty or truncated marker: the writer was killed while writing it."""
    identity = folder.stem.removeprefix(f".{name}.")
    try:
        return os.listdir(folder) == [MARKER] and _is_folder(folder) and _text(name, identity).startswith(_read(folder))
    except OSError:
        return False


def _text(name: str, identity: str) -> str:
    return f"{_HEAD}\n{identity}\n{name}"


def _read(folder: Path) -> str:
    """The marker's text, empty without a marker. Does not follow links or block on a FIFO."""
    try:
        if not _is_folder(folder):
            return ""
        descriptor = os.open(
            folder / MARKER, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
        )
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        return os.read(descriptor, _LONGEST).decode("utf-8", "surrogateescape")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _is_folder(place: Path) -> bool:
    """Whether it is a folder and not a link to one."""
    return stat.S_ISDIR(os.lstat(place).st_mode)
