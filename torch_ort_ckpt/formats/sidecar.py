"""The `.data` sidecar of an `ort` checkpoint, and how the two files change together.

Two renames can't be one, so both files end in the same 64-byte seal, a digest of the content. The new data is first
put beside the old as `<path>.data.<id>`, then the checkpoint is renamed (this commits), then the data takes its final name. A reader that
finds the checkpoint's seal missing from `<path>.data` looks for `<path>.data.<id>`: at every moment the old or the new pair can be read.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import CheckpointError, CorruptFileError, MissingFileError
from ..storage import FileBuffer, PathLike, PendingFile, directory_lock, fsync_directory, remove_abandoned, save_error, warn

_MAGIC = b"TOCPAIR1"
_SIZE = 64


def path_of(path: PathLike) -> Path:
    """Where ORT looks for the data of a checkpoint."""
    return Path(f"{os.fspath(path)}.data")


def find(path: Path, main: FileBuffer, mmap: bool) -> FileBuffer:
    """Open the data that belongs to the checkpoint `main` was read from."""
    place = path_of(path)
    wanted = _seal(main)
    found: FileBuffer | None = None
    for candidate, interrupted in _candidates(path, wanted):
        _refuse_foreign_link(path, candidate)
        try:
            found = FileBuffer(candidate, mmap=mmap)
        except MissingFileError:
            if candidate.is_symlink():
                raise
            continue
        if not wanted or _seal(found) == wanted:
            if interrupted:
                warn(
                    f"{path}: the last save was cut short or is not over yet; its data is in {candidate.name}. "
                    "`torch-ort-ckpt verify --repair` completes it."
                )
            return found
    if found is None:
        raise MissingFileError(
            "the external data of this checkpoint is missing", path=place, remedy="Copy it beside the checkpoint, under this name."
        )
    raise CorruptFileError(
        "belongs to another save than the checkpoint (an interrupted save, or only one of the two files was copied)",
        path=place,
        remedy="Restore both files from the same copy.",
    )


def _candidates(path: Path, wanted: str | None) -> Iterator[tuple[Path, bool]]:
    """Where the data can be, and whether it is there only because a save was interrupted."""
    for home in dict.fromkeys((path_of(path), path_of(os.path.realpath(path)))):  # through a link, we write beside the file itself
        yield home, False
        if wanted:
            yield Path(f"{home}.{wanted}"), True
            yield home, False  # a writer may have renamed it between the two looks


def seal(identity: str) -> bytes:
    return (_MAGIC + identity.encode()).ljust(_SIZE, b"\0")


def commit(data: PendingFile, main: PendingFile, identity: str, durable: bool) -> None:
    """Put both finished files in place, in the order that keeps one pair readable at every moment."""
    data.finish(durable)
    main.finish(durable)
    waiting = Path(f"{path_of(main.target)}.{identity}")
    with directory_lock(main.target.parent):  # two writers of one pair must not mix their renames
        if path_of(main.target).is_dir():  # known now, it costs nothing; after the commit it would
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        data.commit(durable, waiting)
        try:
            main.commit(durable)
        except OSError:
            if not main.committed and not _belongs(main.target, identity):
                os.unlink(waiting)
            raise
        os.replace(waiting, path_of(main.target))
        if durable:
            fsync_directory(main.target.parent)
        remove_leftovers(main.target)


def repair(path: Path) -> bool:
    """Finish a save that was interrupted between its two renames; returns whether there was anything to do."""
    target = Path(os.path.realpath(path))
    with directory_lock(target.parent):
        wanted = _seal(FileBuffer(target))
        waiting = Path(f"{path_of(target)}.{wanted}")
        if not wanted or not os.path.lexists(waiting):
            return False
        _refuse_foreign_link(target, waiting)
        if _seal(FileBuffer(waiting)) != wanted:
            return False
        try:
            os.replace(waiting, path_of(target))
            fsync_directory(target.parent)
        except OSError as error:
            raise save_error(error, path_of(target)) from error
    return True


def _belongs(path: Path, identity: str) -> bool:
    """Whether the checkpoint there is the one this data was made for."""
    try:
        return _seal(FileBuffer(path)) == identity
    except CheckpointError:
        return False


def _seal(buffer: FileBuffer) -> str | None:
    """The identity both files of a pair end in; None for files that ORT wrote."""
    if buffer.size < _SIZE:
        return None
    tail = bytes(buffer.data[buffer.size - _SIZE : buffer.size])
    identity = tail[len(_MAGIC) : len(_MAGIC) + 32]
    if not tail.startswith(_MAGIC) or not all(c in b"0123456789abcdef" for c in identity):
        return None
    return identity.decode()


def _refuse_foreign_link(path: Path, sidecar: Path) -> None:
    """A sidecar may be a link only to where the checkpoint itself lives (as in content-addressed caches)."""
    if not sidecar.is_symlink():
        return
    homes = {os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.dirname(os.path.realpath(path))}
    if os.path.dirname(os.path.realpath(sidecar)) not in homes:
        raise CheckpointError("a symbolic link to another folder", path=sidecar, remedy="Put the file itself beside the checkpoint.")


def remove(target: Path, *, replaced_pair: bool) -> None:
    """The data of a checkpoint that no longer has any: what belonged to the pair just replaced, or that a killed save of ours left."""
    with contextlib.suppress(OSError, CheckpointError):
        if replaced_pair or _seal(FileBuffer(path_of(target))):
            os.unlink(path_of(target))
    remove_leftovers(target)


def remove_leftovers(target: Path) -> None:
    """Data files of interrupted saves that nothing refers to any more."""
    remove_abandoned(path_of(target))
    names: Iterable[str] = ()
    with contextlib.suppress(OSError):
        names = os.listdir(target.parent)
    prefix = f"{target.name}.data."
    for name in names:
        suffix = name.removeprefix(prefix)
        if name.startswith(prefix) and len(suffix) == 32 and all(c in "0123456789abcdef" for c in suffix):
            with contextlib.suppress(OSError):
                os.unlink(target.parent / name)
