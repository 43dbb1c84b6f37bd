"""Files that change together: a main file and the ones it refers to.

Several renames can't be one, so every file of a set carries the same identity, a hash of the whole content. A save first puts the others
beside the old ones as `<name>.<identity>`, then renames the main file (this commits), then gives the others their final names. A reader
that finds another identity in `<name>` looks for `<name>.<identity>`: at every moment the old or the new set can be read.
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
from .files import PathLike, PendingFile, directory_lock, fsync_directory, remove_abandoned, save_error, unsynced_error, warn
from .hashing import Hasher, file_hash

IDENTITY_LENGTH = 32
T = TypeVar("T")


class Fingerprint:
    """The identity of a set: a hash over all that is in it. Different content has a different one; it is no defence against forgery."""

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
    """Put all finished files in place, in the order that keeps one set readable at every moment.

    The new set counts from when `main` has its name, or, where readers would still prefer the file `hidden_by`, from when that is gone.
    Errors say which set is there. `obsolete` files of the replaced save go last.
    """
    for pending in (*others, main):
        pending.finish(durable)
    folder = main.target.parent
    with directory_lock(folder):  # two writers of one set must not mix their renames
        if any(pending.target.is_dir() for pending in others):  # known now, it costs nothing; after the commit it would
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        places = [waiting(pending.target, identity) for pending in others]
        new = [place for place in places if not os.path.lexists(place)]  # the rest: parts of an interrupted save of this very content
        hidden = hidden_by is not None and os.path.lexists(hidden_by)
        problem: OSError | None = None
        try:
            for pending, place in zip(others, places, strict=True):
                pending.commit(durable, place)
            main.commit(durable)
            if hidden_by is not None and hidden:
                os.unlink(hidden_by)
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
                os.replace(place, pending.target)
        except OSError as error:
            raise CheckpointError(
                f"the new checkpoint is complete, but not all of its files could be given their names ({error.strerror or error})",
                path=main.target,
                remedy="It loads as it is; `torch-ort-ckpt verify --repair` completes the save.",
            ) from error
        for place in obsolete:
            try:
                os.unlink(place)
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
    """Where a file of the set is until its final rename."""
    return Path(f"{os.fspath(target)}.{identity}")


def locate(main: PathLike, targets: Sequence[Path], identity: str | None, opened: Callable[[Path], tuple[T, str | None]]) -> T:
    """Open the part of the set that `main` belongs to, found under one of `targets`. `opened` gives the part and its identity.

    No identity: a set that others wrote, taken as it is.
    """
    if not _is_plausible(identity):
        raise CorruptFileError("the identity of its save is not one", path=main)
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
                    f"{main}: the last save was cut short or is not over yet; its data is in {place.name}. "
                    "`torch-ort-ckpt verify --repair` completes it."
                )
            elif identity and _differs(place, waiting(place, identity)):
                warn(
                    f"{main}: {place.name} and {place.name}.{identity} both say that they belong to it, and differ: a save by an older "
                    f"version of this library was cut short. {place.name} is read; compare it with a copy, and remove the other."
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
    """Whether `other` is there, with other bytes: older versions identified sets by sums, which two contents can share."""
    try:
        return os.path.lexists(other) and file_hash(place) != file_hash(other)
    except CheckpointError:  # a writer has just moved it
        return False


def _is_plausible(identity: str | None) -> bool:
    """An identity comes from a file and becomes part of a file's name: hexadecimal digits are all it may have."""
    return identity is None or (0 < len(identity) <= 128 and not identity.strip("0123456789abcdef"))


def _candidates(targets: Sequence[Path], identity: str | None) -> Iterator[tuple[Path, bool]]:
    """Where the part can be, and whether it is there only because a save was interrupted."""
    for target in targets:
        yield target, False
        if identity:
            yield waiting(target, identity), True
            yield target, False  # a writer may have renamed it between the two looks


def repair(target: Path, identity: str | None, identity_at: Callable[[Path], str | None]) -> bool:
    """Give a part its final name if the save was cut short before that; returns whether there was anything to do. Call it locked."""
    if not identity or not _is_plausible(identity) or not _is_part(place := waiting(target, identity), identity, identity_at):
        return False
    in_place = _is_part(target, identity, identity_at)
    if in_place and file_hash(place) != file_hash(target):  # the part is in place already: never exchanged for another
        return False
    try:
        if in_place:
            os.unlink(place)
        else:
            os.replace(place, target)
        fsync_directory(target.parent)
    except OSError as error:
        raise save_error(error, target) from error
    return True


def remove_leftovers(target: Path, identity_at: Callable[[Path], str | None]) -> None:
    """Parts of interrupted saves that nothing refers to any more, and temporaries of killed writers. Call it locked."""
    remove_abandoned(target)
    prefix = f"{target.name}."
    with contextlib.suppress(OSError):
        for name in os.listdir(target.parent):
            suffix, place = name.removeprefix(prefix), target.parent / name
            if name.startswith(prefix) and len(suffix) == IDENTITY_LENGTH and _is_part(place, suffix, identity_at):
                with contextlib.suppress(OSError):
                    os.unlink(place)


def _is_part(place: Path, identity: str, identity_at: Callable[[Path], str | None]) -> bool:
    """Whether a file of the set with that identity is there."""
    try:
        return identity_at(place) == identity
    except CheckpointError:
        return False
