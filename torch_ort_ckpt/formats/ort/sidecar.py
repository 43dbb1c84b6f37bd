"""The `.data` sidecar of an `ort` checkpoint. Both files end in the same 64-byte seal with the set's identity (see `fileset`)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ...errors import CheckpointError
from ...storage import filesets as fileset
from ...storage.buffers import FileBuffer
from ...storage.locks import directory_lock
from ...storage.paths import PathLike

_MAGIC = b"TOCPAIR1"
_SIZE = 64


def path_of(path: PathLike) -> Path:
    """Where ORT looks for the data of a checkpoint."""
    return Path(f"{os.fspath(path)}.data")


def seal(identity: str) -> bytes:
    return (_MAGIC + identity.encode()).ljust(_SIZE, b"\0")


def find(path: Path, main: FileBuffer, mmap: bool) -> FileBuffer:
    """Open the data that belongs to the checkpoint `main` was read from."""

    def opened(place: Path) -> tuple[FileBuffer, str | None]:
        _refuse_foreign_link(path, place)
        buffer = FileBuffer(place, mmap=mmap)
        return buffer, identity_of(buffer)

    homes = dict.fromkeys((path_of(path), path_of(os.path.realpath(path))))  # follow a link: write next to the file itself
    return fileset.locate(path, list(homes), identity_of(main), opened)


def repair(path: Path) -> bool:
    """Finish a save that was interrupted between its two renames; returns whether there was anything to do."""
    target = Path(os.path.realpath(path))
    with directory_lock(target.parent):
        return fileset.repair(path_of(target), identity_of(FileBuffer(target, kept=False)), identity_at)


def identity_at(place: Path) -> str | None:
    """What the seal of that file says; links are not followed."""
    return None if place.is_symlink() else identity_of(FileBuffer(place, kept=False))


def remove(target: Path, *, replaced_pair: bool) -> None:
    """The data of a checkpoint that no longer has any: what belonged to the pair just replaced, or that a killed save of ours left."""
    place = path_of(target)
    with contextlib.suppress(OSError, CheckpointError):
        if replaced_pair or identity_of(FileBuffer(place, kept=False)):
            os.unlink(place)
    fileset.remove_leftovers(place, identity_at)


def identity_of(buffer: FileBuffer) -> str | None:
    """What the file's seal says; None for files that ORT wrote."""
    tail = bytes(buffer.data[max(0, buffer.size - _SIZE) : buffer.size])
    identity = tail[len(_MAGIC) : len(_MAGIC) + fileset.IDENTITY_LENGTH]
    if len(tail) < _SIZE or not tail.startswith(_MAGIC) or identity.strip(b"0123456789abcdef"):
        return None
    return identity.decode()


def _refuse_foreign_link(path: Path, sidecar: Path) -> None:
    """A sidecar may be a link only to where the checkpoint itself lives (as in content-addressed caches)."""
    if not sidecar.is_symlink():
        return
    homes = {os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.dirname(os.path.realpath(path))}
    if os.path.dirname(os.path.realpath(sidecar)) not in homes:
        raise CheckpointError("a symbolic link to another folder", path=sidecar, remedy="Put the file itself beside the checkpoint.")
