"""Files that change together: a main file and the ones it refers to.

Several renames are not atomic, so every file of a set carries the same identity, a hash of the whole content. A save first puts the others
next to the old ones as `<name>.<identity>`, then renames the main file (the commit), then renames the others to their final names. A reader
that finds a different identity in `<name>` looks for `<name>.<identity>`: the old or the new set is readable at any time.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from ..errors import CheckpointError, CorruptFileError, MissingFileError
from .files import PendingFile, fsync_directory, remove_abandoned, save_error, unsynced_error, warn
from .hashing import Hasher, file_hash
from .locks import directory_lock
from .paths import PathLike
from .system import patiently

IDENTITY_LENGTH = 32
T = TypeVar("T")


class Fingerprint:
    """The identity of a set: a hash of its whole content. It is not cryptographic and does not protect against forgery."""

    def __init__(self, head: bytes | bytearray = b"") -> None:
        self._hash = Hasher()
        self.head(head)

    def head(self, text: bytes | bytearray) -> None:
        self._hash.update(b"%d:" % len(text))
        self._hash.update(text)

    def update(self, tensor: torch.Tensor) -> None:
        self._hash.update(b"%d:" % (tensor.numel() * tensor.element_size()))
        self._hash.update_tensor(tensor)

    def identity(self) -> str:
        return self._hash.hex()


def commit(
    main: PendingFile,
    others: Sequence[PendingFile],
    identity: str,
    durable: bool,
    identity_at: Callable[[Path], str | None],
    hidden_by: Path | None = None,
    obsolete: Sequence[Path] = (),
) -> None:
    """Rename all finished files into place, in an order that keeps one set readable at any time.

    The new set is committed when `main` is renamed or, where readers would still prefer the file `hidden_by`, when that is deleted.
    Errors say which set is in place. `obsolete` files of the replaced save are deleted last.
    """
    for pending in (*others, main):
        pending.finish(durable)
    folder = main.target.parent
    with directory_lock(folder):  # two writers of one set must not mix their renames
        if any(pending.target.is_dir() for pending in others):  # fail here, before the commit, rather than after it
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        places = [waiting(pending.target, identity) for pending in others]
        new = [place for place in places if not os.path.lexists(place)]  # the others are parts of an interrupted save of the same content
        hidden = hidden_by is not None and os.path.lexists(hidden_by)
        problem: OSError | None = None
        try:
            for pending, place in zip(others, places, strict=True):
                pending.commit(durable, place)
            main.commit(durable)
            if hidden_by is not None and hidden:
                patiently(os.unlink, hidden_by)
                hidden = False
        except OSError as error:
            if not main.committed or hidden:
                for place in (*new, *((main.target,) if main.committed else ())):
                    with contextlib.suppress(OSError):
                        os.unlink(place)
                raise save_error(error, main.target) from error
            problem = error
        try:
            for pending, place in zip(others, places, strict=True):
                patiently(os.replace, place, pending.target)
        except OSError as error:
            raise CheckpointError(
                f"the new checkpoint is complete, but not all of its files could be given their names ({error.strerror or error})",
                path=main.target,
                remedy="It loads as it is; `torch-ort-ckpt verify --repair` completes the save.",
            ) from error
        for place in obsolete:
            try:
                patiently(os.unlink, place)
            except OSError as error:
                if os.path.lexists(place):
                    warn(f"{place}: belongs to the checkpoint that was replaced, and can't be removed ({error.strerror})")
        for place in {*obsolete, *(pending.target for pending in others)}:
            remove_leftovers(place, identity_at)
        try:
            if durable and (others or obsolete or hidden_by):
                fsync_directory(folder)
        except OSError as error:
            problem = problem or error
        if problem is not None:
            raise unsynced_error(problem, main.target) from problem


def waiting(target: PathLike, identity: str) -> Path:
    """The path of a file of the set before its final rename."""
    return Path(f"{os.fspath(target)}.{identity}")


def locate(main: PathLike, targets: Sequence[Path], identity: str | None, opened: Callable[[Path], tuple[T, str | None]]) -> T:
    """Open the part that belongs to the same set as `main`, at one of `targets`. `opened` returns the part and its identity.

    Without an identity the set was written by other software and is read as it is.
    """
    if not _is_plausible(identity):
        raise CorruptFileError("the identity of its save is malformed", path=main)
    found = False
    for place, interrupted in _candidates(targets, identity):
        try:
            part, own = opened(place)
        except MissingFileError:
            if place.is_symlink():
                raise
            continue
        if identity is None or own == identity:
            if interrupted:
                warn(
                    f"{main}: the last save was interrupted or is still running; its data is in {place.name}. "
                    "`torch-ort-ckpt verify --repair` completes it."
                )
            elif identity and _differs(place, waiting(place, identity)):
                warn(
                    f"{main}: {place.name} and {place.name}.{identity} both claim to belong to it, but differ: a save by an older "
                    f"version of this library was interrupted. {place.name} is used; compare it with a backup, and remove the other."
                )
            return part
        found = True
    if not found:
        raise MissingFileError(
            "a part of this checkpoint is missing", path=targets[0], remedy="Copy it beside the checkpoint, under this name."
        )
    raise CorruptFileError(
        f"belongs to another save than {os.path.basename(os.fspath(main))} (an interrupted save, or only some of the files were copied)",
        path=targets[0],
        remedy="Restore all files of the checkpoint from the same copy.",
    )


def _differs(place: Path, other: Path) -> bool:
    """Whether `other` exists with different bytes: older versions identified sets by checksums that can collide."""
    try:
        return os.path.lexists(other) and file_hash(place) != file_hash(other)
    except CheckpointError:  # a writer has just renamed it
        return False


def _is_plausible(identity: str | None) -> bool:
    """An identity is read from a file and becomes part of a file name, so only hexadecimal digits are allowed."""
    return identity is None or (0 < len(identity) <= 128 and not identity.strip("0123456789abcdef"))


def _candidates(targets: Sequence[Path], identity: str | None) -> Iterator[tuple[Path, bool]]:
    """The possible paths of the part, and whether each exists only after an interrupted save."""
    for target in targets:
        yield target, False
        if identity:
            yield waiting(target, identity), True
            yield target, False  # a writer may have renamed it between the two checks


def repair(target: Path, identity: str | None, identity_at: Callable[[Path], str | None]) -> bool:
    """Rename a part to its final name if the save was interrupted before that; returns whether it did. The caller holds the lock."""
    if not identity or not _is_plausible(identity) or not _is_part(place := waiting(target, identity), identity, identity_at):
        return False
    in_place = _is_part(target, identity, identity_at)
    if in_place and file_hash(place) != file_hash(target):  # the part is already in place and is never replaced
        return False
    try:
        if in_place:
            patiently(os.unlink, place)
        else:
            patiently(os.replace, place, target)
        fsync_directory(target.parent)
    except OSError as error:
        raise save_error(error, target) from error
    return True


def remove_leftovers(target: Path, identity_at: Callable[[Path], str | None]) -> None:
    """Unreferenced parts of interrupted saves, and temporaries of killed writers. The caller holds the lock."""
    remove_abandoned(target)
    prefix = f"{target.name}."
    with contextlib.suppress(OSError):
        for name in os.listdir(target.parent):
            suffix, place = name.removeprefix(prefix), target.parent / name
            if name.startswith(prefix) and len(suffix) == IDENTITY_LENGTH and _is_part(place, suffix, identity_at):
                with contextlib.suppress(OSError):
                    os.unlink(place)


def _is_part(place: Path, identity: str, identity_at: Callable[[Path], str | None]) -> bool:
    """Whether a file of the set with that identity exists."""
    try:
        return identity_at(place) == identity
    except CheckpointError:
        return False
