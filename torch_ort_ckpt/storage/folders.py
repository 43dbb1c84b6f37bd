"""Folders that are written next to their target and renamed into place: folder formats, and entries of a checkpoint directory.

One rename can't replace a non-empty folder. The new one is written and synced as `.<name>.<id>.new`; then the old one is renamed to
`.<name>.<id>.old` (the commit) and the new one to `<name>`. After an interruption between the two, the `.old` marks its `.new` as complete:
`surviving` finds it for readers, `repair` finishes the save. Entries of a checkpoint directory have a manifest that says whether they are
complete, and `Rules` of their own (see `training/directory.py`).

The new folder contains a marker (see `ownership`) until the old one is deleted. It tells leftovers from folders of other software: a `.new`
is ours if it contains a marker, an `.old` if the marker of the folder in place has the same id.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ..errors import CheckpointError
from .files import create_file, discarding, fsync_directory, save_error, unsynced_error, warn
from .locks import LOCK_FILE, directory_lock
from .ownership import IDENTITY, MARKER, MarkedFolder, delete_abandoned, delete_folder, identity_of
from .paths import PathLike, as_path, refuse_unportable
from .system import is_windows, patiently, sync


@dataclasses.dataclass(frozen=True)
class Rules:
    """What differs between the kinds of folders: checkpoints in a folder format, and entries of a checkpoint directory."""

    suffix: str
    """Of the temporary name."""
    check: Callable[[Path], None]
    """Raises for a path in use that may not be replaced."""
    clean_up: Callable[[Path, Path | None], None]
    """Called with the new folder in place and what it replaced, under the lock of the folder around them."""
    remedy: str
    """What finishes a save that was interrupted between its two renames."""


class PendingFolder:
    """A folder being written next to `target` under its writer's lock; `commit` renames it into place."""

    def __init__(self, target: Path, rules: Rules) -> None:
        self.target, self._rules = target, rules
        self.committed = self.in_place = False
        self._open: list[BinaryIO] = []
        self._names: list[str] = []
        if os.path.lexists(target):
            rules.check(target)  # before gigabytes are written
        self._folder = MarkedFolder(target, rules.suffix)
        self.path = self._folder.path

    def open(self, name: str) -> BinaryIO:
        """A new file in the folder, for `finish` to sync and close."""
        refuse_unportable([*self._names, name], self.target)
        file = create_file(self.path / name)
        self._names.append(name)
        self._open.append(file)
        return file

    def finish(self, durable: bool) -> None:
        for file in self._open:
            if durable:
                sync(file.fileno())
            file.close()
        if durable:
            fsync_directory(self.path)

    def commit(self, durable: bool) -> None:
        """Rename the folder to its final name. An existing one is moved away first, and deleted at the end."""
        parent = self.target.parent
        with directory_lock(parent):
            if is_windows():
                self._folder.close()
            replaced = None if self._was_promoted() else self._replace(durable)
            self.committed = self.in_place = True
            if durable:
                fsync_directory(parent)
            self._rules.clean_up(self.target, replaced)

    def _replace(self, durable: bool) -> Path | None:
        aside: Path | None = None
        if os.path.lexists(self.target):
            self._rules.check(self.target)
            _remove_replaced(self.target)  # ours, as the marker shows that is deleted next
            aside = _sibling(self.target, self._folder.identity, "old")
            patiently(os.rename, self.target, aside)
            self.committed = True
        try:
            if durable and aside is not None:
                fsync_directory(self.target.parent)
            patiently(os.rename, self.path, self.target)
        except OSError:
            if aside is not None:
                os.rename(aside, self.target)
                self.committed = False
            raise
        return aside

    def _was_promoted(self) -> bool:
        """Without locks another process can't know that this writer is alive, and may have renamed the complete folder already."""
        return not self.path.exists() and identity_of(self.target, self.target.name) == self._folder.identity

    def discard(self) -> None:
        """Close what is open; remove the new folder unless it was committed. Errors here are ignored, so as not to hide an earlier one."""
        for file in self._open:
            with contextlib.suppress(OSError):
                file.close()
        with contextlib.suppress(OSError):
            if is_windows():
                self._folder.close()
        if not self.committed:  # between the two renames only the new folder exists
            delete_folder(self.path)
        with contextlib.suppress(OSError):
            self._folder.close()

    def failure(self, error: OSError, path: PathLike) -> CheckpointError:
        """Before the commit the old folder is in place, after it the new one."""
        if self.committed and not self.in_place:
            return CheckpointError(
                f"the new checkpoint is complete, but could not be given its name ({error.strerror or error})",
                path=path,
                remedy=self._rules.remedy,
            )
        return (unsynced_error if self.committed else save_error)(error, path)


@contextlib.contextmanager
def atomic_folder(path: PathLike, owns: Callable[[str], bool], *, durable: bool = True) -> Iterator[PendingFolder]:
    """A folder that replaces `path` when the block succeeds, and is deleted when it raises.

    An existing folder is replaced only if `owns` accepts every name in it: files that are not part of a checkpoint are never deleted.
    """
    target = Path(os.path.realpath(as_path(path)))
    rules = Rules("new", partial(_check_replaceable, owns=owns), _remove_leftovers, _REMEDY)
    with discarding(lambda: PendingFolder(target, rules), path) as pending:
        yield pending
        pending.finish(durable)
        pending.commit(durable)


_REMEDY = "It loads as it is; `torch-ort-ckpt verify --repair` completes the save."


def surviving(path: PathLike, *, quiet: bool = False) -> Path:
    """The folder that holds the checkpoint `path`: `path` itself or, after an interrupted save, the folder about to be renamed to it."""
    place = as_path(path)
    if os.path.lexists(place) or (found := _interrupted(place)) is None:
        return place
    if quiet:
        return found
    warn(f"{place}: the last save was interrupted; reading {found.name}. `torch-ort-ckpt verify --repair` completes it.")
    return found


def repair(path: PathLike) -> bool:
    """Finish a save that was interrupted between its two renames; returns whether there was one."""
    target = Path(os.path.realpath(as_path(path)))
    with directory_lock(target.parent):
        if os.path.lexists(target) or (found := _interrupted(target)) is None:
            return False
        try:
            patiently(os.rename, found, target)
            fsync_directory(target.parent)
        except OSError as error:
            raise save_error(error, path) from error
        _remove_leftovers(target)
    return True


def _sibling(target: Path, identity: str, kind: str) -> Path:
    return target.with_name(f".{target.name}.{identity}.{kind}")


def _siblings(target: Path, kind: str) -> list[Path]:
    pattern = re.compile(re.escape(f".{target.name}.") + f"({IDENTITY})" + re.escape(f".{kind}"))
    try:
        names = os.listdir(target.parent)
    except OSError:
        return []
    return sorted(target.with_name(name) for name in names if pattern.fullmatch(name))


def _partner(sibling: Path, kind: str) -> Path:
    """The other folder of the same save."""
    return sibling.with_name(sibling.name[:-3] + kind)


def _interrupted(target: Path) -> Path | None:
    for aside in _siblings(target, "old"):
        fresh = _partner(aside, "new")
        return fresh if fresh.is_dir() else aside
    return None


def _remove_leftovers(target: Path, _: Path | None = None) -> None:
    """Leftovers of saves next to a folder in place: the folder it replaced, new ones without a living writer, and its own marker."""
    _remove_replaced(target)
    if identity_of(target, target.name) is not None:
        patiently(os.unlink, target / MARKER)
    for fresh in _siblings(target, "new"):
        delete_abandoned(fresh, target.name, partner=_partner(fresh, "old"))


def _remove_replaced(target: Path) -> None:
    """The folder that `target` replaced: the one with the id in its marker."""
    identity = identity_of(target, target.name)
    if identity is not None:
        delete_folder(_sibling(target, identity, "old"))


def _check_replaceable(target: Path, owns: Callable[[str], bool]) -> None:
    if not target.is_dir():
        raise CheckpointError(
            "a file exists where a checkpoint folder is to be written", path=target, remedy="Remove it, or choose another name."
        )
    foreign = sorted(name for name in os.listdir(target) if not owns(name) and not _is_our_marker(target, name))
    if foreign:
        raise CheckpointError(
            f"the folder holds files that are not part of a checkpoint ({', '.join(foreign[:3])}), which replacing it would delete",
            path=target,
            remedy="Give the checkpoint a folder of its own.",
        )


def _is_our_marker(target: Path, name: str) -> bool:
    return name == LOCK_FILE or (name == MARKER and identity_of(target, target.name) is not None)
