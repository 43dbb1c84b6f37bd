"""Files of a folder that are replaced together: a reader finds either the whole old set or the whole new one.

For files that can't carry an identity (see `filesets`), such as ONNX models. New files are written to `.<name>.<id>.new` inside the folder,
where `<name>` is that of the set. Renaming it to `.<name>.<id>.commit` is the commit: from then on the files in it are the set, whatever is
still next to it. They are then moved to their names one by one and the folder is removed. After an interruption in between, `current_files`
still finds the whole set, and the next save finishes the moves.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..errors import CheckpointError
from .files import create_file, discarding, fsync_directory, save_error, warn
from .locks import directory_lock
from .ownership import IDENTITY, MarkedFolder, delete_abandoned, delete_folder, identity_of
from .paths import PathLike
from .system import is_windows, patiently, sync

_CONTENTS = "set.json"
"""In a committed folder: the files of the set, and the files that it replaces."""


class PendingSet:
    """Files being written to `path`; `commit` makes them the folder's set. `owns` tells whether a file name belongs to the set, `check`
    raises if the files in the folder may not be replaced."""

    def __init__(self, folder: Path, name: str, owns: Callable[[str], bool], check: Callable[[], None]) -> None:
        self.folder, self.committed = folder, False
        self._name, self._owns, self._check = name, owns, check
        check()
        self._created = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._staging = MarkedFolder(folder / name, "new")
        self.path = self._staging.path

    def commit(self, names: Iterable[str]) -> None:
        """Replace every file of the folder that belongs to this set by the named files. What else is in `path` is deleted."""
        files = sorted(names)
        for name in files:
            _sync(self.path / name)
        with directory_lock(self.folder):
            _finish(self.folder, self._name)
            self._check()
            _write_contents(self.path, files, [name for name in os.listdir(self.folder) if self._owns(name)])
            fsync_directory(self.path)
            if is_windows():
                self._staging.close()
            patiently(os.rename, self.path, self.path.with_suffix(".commit"))
            self.committed = True
            fsync_directory(self.folder)
            _finish(self.folder, self._name)
            _remove_abandoned(self.folder, self._name)

    def discard(self) -> None:
        """Remove what a failed save left: its staging folder, and the folders that were made for it."""
        if is_windows():
            self._staging.close()
        if not self.committed:
            delete_folder(self.path)
            for place in self._created:
                with contextlib.suppress(OSError):
                    place.rmdir()
        self._staging.close()

    def failure(self, error: OSError, path: PathLike) -> CheckpointError:
        if not self.committed:
            return save_error(error, path)
        return CheckpointError(
            f"the new files are committed, but could not all be moved to their names ({error.strerror or error})",
            path=path,
            remedy="They load as they are. The next save into this folder finishes the move.",
        )


def pending_set(
    folder: Path, name: str, owns: Callable[[str], bool], check: Callable[[], None]
) -> contextlib.AbstractContextManager[PendingSet]:
    """A `PendingSet` that leaves nothing behind unless it is committed. Errors of the file system become `CheckpointError`."""
    return discarding(lambda: PendingSet(folder, name, owns, check), folder)


def current_files(folder: Path, name: str) -> dict[str, Path]:
    """Every file of the folder by name, and its path: a committed set takes precedence over the files it replaces."""
    try:
        files = {item: folder / item for item in os.listdir(folder) if not item.startswith(".")}
    except OSError:
        return {}
    for place, new, replaced in _committed(folder, name):
        for item in replaced:
            if item not in new:
                files.pop(item, None)
        waiting = {item: place / item for item in new if (place / item).is_file()}
        if waiting:
            warn(f"{folder}: the last save was interrupted; reading {', '.join(waiting)} from {place.name}.")
        files.update(waiting)
    return files


def _finish(folder: Path, name: str) -> None:
    """Move the files of a committed set to their names. The caller holds the lock."""
    for place, new, replaced in _committed(folder, name):
        for item in replaced:
            if item not in new:
                (folder / item).unlink(missing_ok=True)
        for item in new:
            if (place / item).is_file():
                patiently(os.replace, place / item, folder / item)
        fsync_directory(folder)
        delete_folder(place)


def _committed(folder: Path, name: str) -> Iterator[tuple[Path, list[str], list[str]]]:
    """The committed sets whose files are not all at their names yet: where they are, what they hold and what they replace."""
    for place in _staging_folders(folder, name, "commit"):
        if identity_of(place, name) is None:
            continue  # not one of ours
        try:
            content = json.loads((place / _CONTENTS).read_text(encoding="utf-8"))
            new, replaced = content["files"], content["replaces"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being deleted
        if all(isinstance(item, str) and item == os.path.basename(item) for item in [*new, *replaced]):
            yield place, new, replaced


def _remove_abandoned(folder: Path, name: str) -> None:
    """What killed writers left: folders without a living writer, and committed ones whose files are all at their names."""
    for place in _staging_folders(folder, name, "new"):
        delete_abandoned(place, name)
    for place in _staging_folders(folder, name, "commit"):
        if not os.path.lexists(place / _CONTENTS):  # deleted only when all files have moved
            delete_abandoned(place, name)


def _staging_folders(folder: Path, name: str, kind: str) -> list[Path]:
    pattern = re.compile(re.escape(f".{name}.") + IDENTITY + re.escape(f".{kind}"))
    return [folder / item for item in sorted(os.listdir(folder)) if pattern.fullmatch(item)]


def _write_contents(place: Path, files: list[str], replaced: list[str]) -> None:
    with create_file(place / _CONTENTS) as file:
        file.write(json.dumps({"files": files, "replaces": replaced}).encode())
        sync(file.fileno())


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        sync(file.fileno())
