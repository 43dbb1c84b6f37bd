"""Files that change together: a main file and the ones it refers to.

Several renames can't be one, so every file of a set carries the same identity, a fingerprint of the content. A save first puts the others
beside the old ones as `<name>.<identity>`, then renames the main file (this commits), then gives the others their final names. A reader
that finds another identity in `<name>` looks for `<name>.<identity>`: at every moment the old or the new set can be read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from ..errors import CorruptFileError, MissingFileError
from ..state import byte_view
from ..storage import PathLike, PendingFile, directory_lock, fsync_directory, remove_abandoned, save_error, warn

IDENTITY_LENGTH = 32
T = TypeVar("T")


class Fingerprint:
    """A cheap identity of content: sums of machine words, at memory speed. Tells two saves apart; it is no defence against forgery."""

    def __init__(self, head: bytes | bytearray = b"") -> None:
        self._hash = hashlib.sha256(head)

    def head(self, text: bytes) -> None:
        self._hash.update(text)

    def update(self, tensor: torch.Tensor) -> None:
        data = byte_view(tensor.cpu())
        whole = data.numel() // 4 * 4 if data.data_ptr() % 4 == 0 else 0
        total = int(data[:whole].view(torch.int32).sum(dtype=torch.int64)) if whole else 0
        self._hash.update(f"{data.numel()}:{total}:".encode())
        self._hash.update(bytes(data[whole:].numpy()))

    def identity(self) -> str:
        return self._hash.hexdigest()[:IDENTITY_LENGTH]


def commit(main: PendingFile, others: Sequence[PendingFile], identity: str, durable: bool, obsolete: Sequence[Path] = ()) -> None:
    """Put all finished files in place, in the order that keeps one set readable at every moment.

    `obsolete` files of the replaced save go right after the main file is in place.
    """
    for pending in (*others, main):
        pending.finish(durable)
    with directory_lock(main.target.parent):  # two writers of one set must not mix their renames
        if any(pending.target.is_dir() for pending in others):  # known now, it costs nothing; after the commit it would
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        places = [waiting(pending.target, identity) for pending in others]
        new = [place for place in places if not os.path.lexists(place)]  # the rest: parts of an interrupted save of this very content
        try:
            for pending, place in zip(others, places, strict=True):
                pending.commit(durable, place)
            main.commit(durable)
        except OSError:
            for place in new if not main.committed else ():
                place.unlink(missing_ok=True)
            raise
        for place in obsolete:
            with contextlib.suppress(OSError):
                os.unlink(place)
        for pending in others:
            os.replace(waiting(pending.target, identity), pending.target)
            remove_leftovers(pending.target)
        if durable and (others or obsolete):
            fsync_directory(main.target.parent)


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
    if (
        not identity
        or not _is_plausible(identity)
        or not os.path.lexists(waiting(target, identity))
        or identity_at(waiting(target, identity)) != identity
    ):
        return False
    try:
        os.replace(waiting(target, identity), target)
        fsync_directory(target.parent)
    except OSError as error:
        raise save_error(error, target) from error
    return True


def remove_leftovers(target: Path) -> None:
    """Parts of interrupted saves that nothing refers to any more, and temporaries of killed writers. Call it locked."""
    remove_abandoned(target)
    prefix = f"{target.name}."
    with contextlib.suppress(OSError):
        for name in os.listdir(target.parent):
            suffix = name.removeprefix(prefix)
            if name.startswith(prefix) and len(suffix) == IDENTITY_LENGTH and not suffix.strip("0123456789abcdef"):
                os.unlink(target.parent / name)
