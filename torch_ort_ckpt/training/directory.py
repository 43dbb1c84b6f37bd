"""The folder that holds the entries: how one appears and disappears in a single rename, and what killed writers left behind.

`checkpoint_<step>` is always whole. A new entry grows in `.checkpoint_<step>.<pid>-<random>.tmp`, and its writer holds a lock on the file
`<that>.lock` for as long as it lives; an old one leaves as `.checkpoint_<step>.<random>.old` before its files go.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from ..storage import directory_lock, fsync_directory, save_error
from .entry import Entry, read_entry

_ENTRY = re.compile(r"checkpoint_(\d+)")
_LEFTOVER = re.compile(r"\.checkpoint_(\d+)\.[\w-]+\.(tmp|old|tmp\.lock)")


def list_entries(directory: Path) -> list[Entry]:
    """Every entry by step, complete or not."""
    with contextlib.suppress(FileNotFoundError):
        names = [name for name in os.listdir(directory) if _ENTRY.fullmatch(name)]
        return sorted((read_entry(directory / name) for name in names), key=lambda entry: entry.step)
    return []


def pending_entry(directory: Path, step: int) -> contextlib.AbstractContextManager[PendingFolder]:
    """A `pending_folder` for one step."""
    return pending_folder(directory / f"checkpoint_{step}")


@contextlib.contextmanager
def pending_folder(target: Path) -> Iterator[PendingFolder]:
    """A folder to fill; gone at the end of the block unless it was committed. Errors of the file system become `CheckpointError`."""
    try:
        pending = PendingFolder(target)
    except OSError as error:
        raise save_error(error, target) from error
    try:
        yield pending
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise save_error(error, pending.target) from error
    finally:
        pending.discard()


class PendingFolder:
    """A temporary folder under its writer's lock."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.committed = False
        self._lock = -1
        while self._lock < 0:
            self.path = target.parent / f".{self.target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
            # Beside the folder, not in it: the formats lock folders they write to.
            self._lock = os.open(_lock_file(self.path), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            _lock(self._lock, wait=True)
            if not os.fstat(self._lock).st_nlink:  # another manager took it for an abandoned one before it was locked
                os.close(self._lock)
                self._lock = -1
        try:
            os.mkdir(self.path)
        except OSError:
            self.discard()
            raise

    def commit(self, durable: bool) -> None:
        """Give the folder its name. One that has the name already makes way; a crash in between is repaired by `clean`."""
        with directory_lock(self.target.parent):
            replaced = _set_aside(self.target) if os.path.lexists(self.target) else None
            os.rename(self.path, self.target)
            self.committed = True
        if durable:
            fsync_directory(self.target.parent)
        if replaced is not None:
            _delete(replaced)

    def discard(self) -> None:
        if not self.committed:
            _delete(self.path)
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.unlink(_lock_file(self.path))
            os.close(self._lock)
            self._lock = -1


def remove(entry: Path) -> None:
    """Take an entry away: out of sight in one rename, then its files."""
    with contextlib.suppress(FileNotFoundError):
        with directory_lock(entry.parent):
            leaving = _set_aside(entry)
        _delete(leaving)


def clean(directory: Path) -> None:
    """Clear up after killed writers: give a complete entry the name it lacked, delete the rest. What a living writer holds stays."""
    found = [(place, match) for place in directory.iterdir() if (match := _LEFTOVER.fullmatch(place.name))]
    # Temporaries first: one that was to replace an entry takes its place before what was set aside for it is deleted.
    for place, match in sorted(found, key=lambda item: ("tmp", "old", "tmp.lock").index(item[1][2])):
        if match[2] == "old":
            _delete(place)
            continue
        with _claimed(place if match[2] == "tmp.lock" else _lock_file(place)) as free:
            if free and match[2] == "tmp.lock":
                place.unlink(missing_ok=True)
            elif free and not _promote(place, directory / f"checkpoint_{match[1]}"):
                _delete(place)


def _promote(place: Path, target: Path) -> bool:
    """Give a leftover that only lacked its last rename its name."""
    with directory_lock(target.parent):
        if target.exists() or read_entry(place).problem is not None:
            return False
        os.rename(place, target)
        return True


def _set_aside(entry: Path) -> Path:
    leaving = entry.with_name(f".{entry.name}.{secrets.token_hex(4)}.old")
    os.rename(entry, leaving)
    return leaving


def _delete(place: Path) -> None:
    if place.is_symlink() or place.is_file():
        place.unlink(missing_ok=True)
        return
    # The manifest goes first: from then on nobody can take the rest for an entry.
    with contextlib.suppress(OSError):
        os.unlink(place / "manifest.json")
    shutil.rmtree(place, ignore_errors=True)


def _lock_file(place: Path) -> Path:
    return place.with_name(place.name + ".lock")


@contextlib.contextmanager
def _claimed(file: Path) -> Iterator[bool]:
    """Whether nobody alive holds this lock file; it is held meanwhile. One that is gone has no writer either."""
    try:
        descriptor = os.open(file, os.O_RDWR)
    except OSError as error:
        yield isinstance(error, FileNotFoundError)
        return
    try:
        yield _lock(descriptor, wait=False)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, wait: bool) -> bool:
    """False where another process holds it, or the file system knows no locks (then nothing is ever taken for abandoned)."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):
        return False
    return True
