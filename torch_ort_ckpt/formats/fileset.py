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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from ..errors import CorruptFileError, MissingFileError
from ..state import byte_view
from ..storage import PathLike, PendingFile, directory_lock, fsync_directory, remove_abandoned, save_error, warn

IDENTITY_LENGTH = 32
Part = TypeVar("Part")


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
        for pending in others:
            if pending.target.is_dir():  # known before the commit, it does no harm
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        ours = [place for place in (waiting(pending.target, identity) for pending in others) if not os.path.lexists(place)]
        try:
            for pending in others:
                pending.commit(durable, waiting(pending.target, identity))
            main.commit(durable)
        except OSError:
            for place in ours if not main.committed else ():
                with contextlib.suppress(OSError):
                    os.unlink(place)
            raise
        for place in obsolete:
            with contextlib.suppress(OSError):
                os.unlink(place)
        for pending in others:
            os.replace(waiting(pending.target, identity), pending.target)
            remove_waiting(pending.target)
        if durable and (others or obsolete):
            fsync_directory(main.target.parent)


def waiting(target: PathLike, identity: str) -> Path:
    """Where a file of the set is until its final rename."""
    return Path(f"{os.fspath(target)}.{identity}")


def locate(main: PathLike, target: Path, identity: str | None, opened: Callable[[Path], tuple[Part, str | None]]) -> Part:
    """The part `target` of the set that `main` belongs to. No identity: a set that others wrote, taken as it is.

    `opened` gives a part and the identity it carries: what was judged is what is used, whoever renames files meanwhile.
    """
    places = [target]
    if identity is not None:
        places += [waiting(target, identity), target]  # again: a writer may have renamed it between the two looks
    found = False
    for place in places:
        try:
            part, own = opened(place)
        except MissingFileError:
            if place.is_symlink():
                raise
            continue
        if identity is None or own == identity:
            if place != target:
                warn(
                    f"{main}: the last save was cut short or is not over yet; using {place.name}. "
                    "`torch-ort-ckpt verify --repair` completes it."
                )
            return part
        found = True
    if not found:
        raise MissingFileError(
            "a part of this checkpoint is missing", path=target, remedy="Copy it beside the checkpoint, under this name."
        )
    raise CorruptFileError(
        f"belongs to another save than {os.path.basename(os.fspath(main))} (an interrupted save, or only some of the files were copied)",
        path=target,
        remedy="Restore all files of the checkpoint from the same copy.",
    )


def repair(target: Path, identity: str | None, identity_of: Callable[[Path], str | None]) -> bool:
    """Give a part its final name if the save was cut short before that; returns whether there was anything to do."""
    if identity is None:
        return False
    with directory_lock(target.parent):
        place = waiting(target, identity)
        if not os.path.lexists(place) or identity_of(place) != identity:
            return False
        try:
            os.replace(place, target)
            fsync_directory(target.parent)
        except OSError as error:
            raise save_error(error, target) from error
    return True


def remove_waiting(target: Path) -> None:
    """Parts of interrupted saves that nothing refers to any more; call under the directory lock."""
    remove_abandoned(target)
    prefix = f"{target.name}."
    with contextlib.suppress(OSError):
        for name in os.listdir(target.parent):
            suffix = name.removeprefix(prefix)
            if name.startswith(prefix) and len(suffix) == IDENTITY_LENGTH and not suffix.strip("0123456789abcdef"):
                os.unlink(target.parent / name)
