"""Checkpoints that are folders: written beside their target and put in its place by renames.

A folder can't replace another in one rename. The new one is written and synced as `.<name>.<id>.new`; then the old one is renamed to
`.<name>.<id>.old` (this commits) and the new one takes the name. Cut short between the two, the `.old` marks its `.new` as complete:
`surviving` finds it for readers, `repair` finishes the save.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import CheckpointError
from .storage import PathLike, as_path, directory_lock, fsync_directory, save_error, warn


class PendingFolder:
    """A folder being written; `open` gives its files."""

    def __init__(self, path: PathLike) -> None:
        self.target = Path(os.path.realpath(path))
        self.identity = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.temporary = _sibling(self.target, self.identity, "new")
        self._open: list[BinaryIO] = []
        os.mkdir(self.temporary)
        self._mark = _lock(self.temporary, wait=True)

    def open(self, name: str) -> BinaryIO:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        file: BinaryIO = os.fdopen(os.open(self.temporary / name, flags, 0o666), "wb", buffering=0)
        self._open.append(file)
        return file

    def finish(self, durable: bool) -> None:
        for file in self._open:
            if durable:
                os.fsync(file.fileno())
            file.close()
        if durable:
            fsync_directory(self.temporary)

    def commit(self, durable: bool, owns: Callable[[str], bool]) -> None:
        parent = self.target.parent
        with directory_lock(parent):
            if os.path.lexists(self.target):
                _check_replaceable(self.target, owns)
                aside = _sibling(self.target, self.identity, "old")
                os.rename(self.target, aside)
                if durable:
                    fsync_directory(parent)
                os.rename(self.temporary, self.target)
                if durable:
                    fsync_directory(parent)
            else:
                os.rename(self.temporary, self.target)
                if durable:
                    fsync_directory(parent)
            _remove_leftovers(self.target)

    def discard(self) -> None:
        for file in self._open:
            file.close()
        committed = _sibling(self.target, self.identity, "old").exists() and not self.target.exists()
        if not committed:  # between the two renames the new folder is all there is
            shutil.rmtree(self.temporary, ignore_errors=True)
        if self._mark is not None:
            os.close(self._mark)


@contextlib.contextmanager
def atomic_folder(path: PathLike, owns: Callable[[str], bool], *, durable: bool = True) -> Iterator[PendingFolder]:
    """A folder that takes the place of `path` when the block ends well, and vanishes when it does not.

    A folder that is already there is replaced only if `owns` knows every name in it: nothing that is not a checkpoint's is ever deleted.
    """
    pending: PendingFolder | None = None
    try:
        target = Path(os.path.realpath(path))
        if os.path.lexists(target):
            _check_replaceable(target, owns)
        pending = PendingFolder(path)
        yield pending
        pending.finish(durable)
        pending.commit(durable, owns)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise save_error(error, path) from error
    finally:
        if pending is not None:
            pending.discard()


def surviving(path: PathLike) -> Path:
    """Where the checkpoint at `path` is: there, or, after a save that was cut short, in the folder that was about to take the name."""
    place = as_path(path)
    if os.path.lexists(place) or (found := _interrupted(place)) is None:
        return place
    warn(f"{place}: the last save was cut short; reading {found.name}. `torch-ort-ckpt verify --repair` completes it.")
    return found


def repair(path: PathLike) -> bool:
    """Finish a save that was cut short between its two renames; returns whether there was anything to do."""
    target = Path(os.path.realpath(path))
    with directory_lock(target.parent):
        if os.path.lexists(target) or (found := _interrupted(target)) is None:
            return False
        os.rename(found, target)
        fsync_directory(target.parent)
        _remove_leftovers(target)
    return True


def _sibling(target: Path, identity: str, kind: str) -> Path:
    return target.with_name(f".{target.name}.{identity}.{kind}")


def _siblings(target: Path, kind: str) -> list[Path]:
    pattern = re.compile(re.escape(f".{target.name}.") + r"\d+-[0-9a-f]{8}" + re.escape(f".{kind}"))
    try:
        names = os.listdir(target.parent)
    except OSError:
        return []
    return sorted(target.with_name(name) for name in names if pattern.fullmatch(name))


def _interrupted(target: Path) -> Path | None:
    for aside in _siblings(target, "old"):
        fresh = aside.with_name(aside.name.removesuffix("old") + "new")
        return fresh if fresh.is_dir() else aside
    return None


def _remove_leftovers(target: Path) -> None:
    """What saves that were cut short left beside a folder that is in place: all that was replaced, and new ones without a living writer."""
    for aside in _siblings(target, "old"):
        shutil.rmtree(aside, ignore_errors=True)
    for fresh in _siblings(target, "new"):
        mark = _lock(fresh, wait=False)
        if mark is not None:
            shutil.rmtree(fresh, ignore_errors=True)
            os.close(mark)


def _lock(folder: Path, wait: bool) -> int | None:
    """Lock a folder for as long as its writer lives; None where there are no locks, or (without `wait`) someone holds it."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _check_replaceable(target: Path, owns: Callable[[str], bool]) -> None:
    if not target.is_dir():
        raise CheckpointError(
            "a file is in the way of a checkpoint that is a folder", path=target, remedy="Remove it, or choose another name."
        )
    foreign = sorted(name for name in os.listdir(target) if not owns(name))
    if foreign:
        raise CheckpointError(
            f"the folder holds other files than a checkpoint's ({', '.join(foreign[:3])}), which replacing it would delete",
            path=target,
            remedy="Give the checkpoint a folder of its own.",
        )
