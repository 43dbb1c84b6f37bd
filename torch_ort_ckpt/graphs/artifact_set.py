"""Atomic replacement of the files of an artifacts folder: a reader finds either the whole old set or the whole new one.

New files are written to `.artifacts-<id>.new` inside the folder. Renaming that to `.artifacts-<id>.commit` is the commit: from then on
the files in it are the set, whatever is still next to it. They are then moved to their names one by one and the folder is removed.
After an interruption in between, `current_files` still finds the whole set, and the next export finishes the moves.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..errors import CheckpointError
from ..storage.files import directory_lock, fsync_directory, save_error, warn

_STAGING = re.compile(r"\.artifacts-[0-9a-f]{8}\.(new|commit)")
_MARKER = "torch_ort_ckpt.json"
"""Written first into every staging folder: a folder without it is not ours and is never read or deleted."""


class PendingSet:
    """Files being written to `path`; `commit` makes them the folder's set."""

    def __init__(self, folder: Path, owns: Callable[[str], bool]) -> None:
        self.folder = folder
        self._owns = owns
        self._created = [place for place in (folder, *folder.parents) if not place.exists()]
        self.path = folder / f".artifacts-{secrets.token_hex(4)}.new"
        self.committed = False
        folder.mkdir(parents=True, exist_ok=True)
        self.path.mkdir()
        _write_marker(self.path, [], [])
        self._alive = _locked(self.path / _MARKER)

    def commit(self, names: Iterable[str], *, overwrite: bool) -> None:
        """Replace every file of the folder that belongs to this set by the named files; the others in `path` are deleted."""
        files = sorted(names)
        for name in files:
            _sync(self.path / name)
        with directory_lock(self.folder):
            finish(self.folder)
            refuse_existing(self.folder, self._owns, overwrite)
            replaced = [name for name in os.listdir(self.folder) if self._owns(name)]
            _write_marker(self.path, files, replaced)
            fsync_directory(self.path)
            place = self.path.with_suffix(".commit")
            os.rename(self.path, place)
            self.committed = True
            fsync_directory(self.folder)
            finish(self.folder)
            _remove_abandoned(self.folder)

    def discard(self) -> None:
        """Remove what a failed export left: its staging folder, and the folders that were made for it."""
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None
        _delete(self.path)
        if not self.committed:
            for place in self._created:
                with contextlib.suppress(OSError):
                    place.rmdir()


@contextlib.contextmanager
def pending_set(folder: Path, owns: Callable[[str], bool], *, overwrite: bool) -> Iterator[PendingSet]:
    """A `PendingSet` that leaves nothing behind unless it is committed. `owns` tells whether a name belongs to the set."""
    refuse_existing(folder, owns, overwrite)
    pending: PendingSet | None = None
    try:
        pending = PendingSet(folder, owns)
        yield pending
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        if pending is not None and pending.committed:
            raise CheckpointError(
                f"the new files are committed, but could not all be moved to their names ({error.strerror})",
                path=folder,
                remedy="They load as they are. The next export into this folder finishes the move.",
            ) from error
        raise save_error(error, folder) from error
    finally:
        if pending is not None:
            pending.discard()


def refuse_existing(folder: Path, owns: Callable[[str], bool], overwrite: bool) -> None:
    """Existing artifacts are replaced only on request."""
    found = [] if overwrite else sorted(filter(owns, current_files(folder)))
    if found:
        raise CheckpointError(
            f"already holds artifacts ({', '.join(found[:4])})",
            path=folder,
            remedy="Pass overwrite=True (--overwrite) to replace them, or choose another folder.",
        )


def current_files(folder: Path) -> dict[str, Path]:
    """Every file of the folder by name, and its path: a committed set takes precedence over the files it replaces."""
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    files = {name: folder / name for name in names if not name.startswith(".")}
    for place, new, replaced in _committed(folder, names):
        for name in replaced:
            if name not in new:
                files.pop(name, None)
        waiting = {name: place / name for name in new if (place / name).is_file()}
        if waiting:
            warn(f"{folder}: the last export was interrupted; reading {', '.join(waiting)} from {place.name}.")
        files.update(waiting)
    return files


def finish(folder: Path) -> None:
    """Move the files of a committed set to their names. The caller holds the lock."""
    for place, new, replaced in _committed(folder, os.listdir(folder)):
        for name in replaced:
            if name not in new:
                (folder / name).unlink(missing_ok=True)
        for name in new:
            if (place / name).is_file():
                os.replace(place / name, folder / name)
        fsync_directory(folder)
        _delete(place)


def _committed(folder: Path, names: Iterable[str]) -> Iterator[tuple[Path, list[str], list[str]]]:
    """The committed sets whose files are not all at their names yet: where they are, what they hold and what they replace."""
    for name in sorted(name for name in names if _STAGING.fullmatch(name) and name.endswith(".commit")):
        try:
            content = json.loads((folder / name / _MARKER).read_text(encoding="utf-8"))
            new, replaced = content["files"], content["replaces"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not one of ours
        if all(isinstance(item, str) and item == os.path.basename(item) for item in [*new, *replaced]):
            yield folder / name, new, replaced


def _remove_abandoned(folder: Path) -> None:
    """Staging folders of killed exports: those with our marker that no living process holds."""
    for name in filter(_STAGING.fullmatch, os.listdir(folder)):
        if name.endswith(".new") and (lock := _locked(folder / name / _MARKER)) is not None:
            _delete(folder / name)
            os.close(lock)
    for name in filter(_STAGING.fullmatch, os.listdir(folder)):
        with contextlib.suppress(OSError):  # killed before its marker was written, or after it was deleted: empty, or not ours
            os.rmdir(folder / name)


def _delete(place: Path) -> None:
    """Delete a staging folder, the marker last: as long as files are left, the folder is known to be ours."""
    with contextlib.suppress(OSError):
        for name in os.listdir(place):
            if name != _MARKER:
                (place / name).unlink()
        (place / _MARKER).unlink()
        place.rmdir()


def _locked(marker: Path) -> int | None:
    """Lock the marker while the descriptor is open; None if locks are not supported or another process holds it."""
    try:
        import fcntl

        descriptor = os.open(marker, os.O_RDWR)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _write_marker(place: Path, files: list[str], replaced: list[str]) -> None:
    marker = place / _MARKER
    marker.write_text(json.dumps({"made_by": "torch_ort_ckpt", "files": files, "replaces": replaced}), encoding="utf-8")
    _sync(marker)


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
