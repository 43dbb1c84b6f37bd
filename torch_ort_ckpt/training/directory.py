"""The folder that holds the entries: each is added and removed in a single rename; leftovers of killed writers are cleaned up.

`checkpoint_<step>` is complete. A new entry is written as `.checkpoint_<step>.<id>.tmp`; an old one gets `.checkpoint_<step>.<id>.old`
before its files are deleted. Each has a marker (see `ownership`), which its writer holds a lock on. Names prove nothing:
a folder without a marker, or a manifest of the version before markers, is not ours and is neither deleted nor replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from functools import partial
from pathlib import Path

from ..errors import CheckpointError
from ..storage.files import discarding, warn
from ..storage.folders import PendingFolder, Rules
from ..storage.locks import LOCK_FILE, directory_lock, remove_lock_file
from ..storage.ownership import (
    MARKER,
    Writer,
    delete_abandoned,
    delete_folder,
    delete_if_empty,
    identity_of,
    new_identity,
    write_marker,
    writer_of,
)
from ..storage.system import patiently
from .entry import MANIFEST, READABLE, Entry, read_entry

_ENTRY = re.compile(r"checkpoint_[0-9]+")
_IDENTITY = r"(?:[0-9]+-)?[0-9a-f]{8}"  # version 1 has no process id in the name
_OWN_FILE = re.compile(
    r"\.?(manifest\.json|checkpoint|(training|rank_[0-9]+)\.(json|safetensors))(\.data)?(\.[0-9a-f-]{8,64})?(\.tmp)?|"
    f"{re.escape(MARKER)}|{re.escape(LOCK_FILE)}"
)
"""The files an entry's folder may contain, temporaries included."""


def list_entries(directory: Path) -> list[Entry]:
    """Every entry by step, complete or not."""
    try:
        names = [name for name in os.listdir(directory) if _ENTRY.fullmatch(name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"can't be listed ({error.strerror})", path=directory, remedy="Check the path and its permissions."
        ) from error
    return sorted((_listed(directory / name) for name in names), key=lambda entry: entry.step)


def _listed(path: Path) -> Entry:
    """An entry's step is the one in its manifest. A folder with another step in its name is reported as renamed."""
    entry = read_entry(path)
    if entry.version in READABLE and path.name != f"checkpoint_{entry.step}":
        problem = f"renamed: it holds step {entry.step}, not the one in its name"
        return dataclasses.replace(entry, step=int(path.name.removeprefix("checkpoint_")), problem=entry.problem or problem)
    return entry


def pending_entry(directory: Path, step: int) -> contextlib.AbstractContextManager[PendingFolder]:
    """The folder for one step's entry."""
    return pending_checkpoint(directory / f"checkpoint_{step}")


def pending_checkpoint(target: Path, *, asked: bool = False) -> contextlib.AbstractContextManager[PendingFolder]:
    """A folder to write to; deleted at the end of the block unless it was committed. File system errors become `CheckpointError`.

    It replaces only what this library made under that name. `asked` means that the user passed this path to save to: then a file,
    or a checkpoint of this library that was made under another name, is replaced as well.
    """
    rules = Rules("tmp", partial(_check_target, asked=asked), _delete_replaced, "It is renamed when the directory is next opened.")
    return discarding(lambda: PendingFolder(target, rules), target)


def _check_target(target: Path, asked: bool) -> None:
    if asked and (target.is_symlink() or target.is_file()):
        return
    if (reason := why_kept(target, None if asked else target.name)) is not None:
        raise CheckpointError(f"can't be replaced by a checkpoint: {reason}", path=target, remedy="Move it away, or save elsewhere.")


def why_kept(folder: Path, name: str | None) -> str | None:
    """Why a folder may not be deleted or replaced; None for one that this library made for `name` (for any, when that is None)."""
    if folder.is_symlink() or not folder.is_dir():
        return "it is not a folder made by this library"
    try:
        foreign = sorted(item for item in os.listdir(folder) if not _OWN_FILE.fullmatch(item))
    except OSError as error:
        return f"it can't be listed ({error.strerror})"
    if foreign:
        return f"it holds files that are not part of a checkpoint ({', '.join(foreign[:3])})"
    if identity_of(folder, name) is None and not _is_version_1(folder, name):
        return "this library did not make it, or not under this name"
    return None


def _is_version_1(folder: Path, name: str | None) -> bool:
    """Entries of version 1 have no markers: a well-formed manifest with the step in the name is accepted."""
    entry = read_entry(folder)
    return entry.version == 1 and (name is None or not _ENTRY.fullmatch(name) or name == f"checkpoint_{entry.step}")


def remove(entry: Path, name: str | None = None) -> str | None:
    """Delete an entry made for `name` (or any): one rename hides it, then its files are deleted. Returns why it was kept, if it was."""
    with contextlib.suppress(FileNotFoundError):
        with directory_lock(entry.parent):
            if (reason := why_kept(entry, name)) is not None:
                return reason if os.path.lexists(entry) else None
            if identity_of(entry) is None:
                _mark(entry)
            leaving = _set_aside(entry)
            if identity_of(leaving) is not None:  # without a manifest it is not mistaken for one that was to be replaced
                with contextlib.suppress(OSError):
                    os.unlink(leaving / MANIFEST)
        _delete(leaving)
    return None


def clean(directory: Path) -> None:
    """Clean up after killed writers of all steps."""
    pattern = re.compile(rf"\.(checkpoint_[0-9]+)\.{_IDENTITY}\.(tmp|old)")
    for name in sorted({match[1] for item in os.listdir(directory) if (match := pattern.fullmatch(item))}):
        recover(directory / name)
    remove_lock_file(directory)


def recover(target: Path) -> None:
    """Clean up after killed writers of one checkpoint: rename a complete one to its final name, delete the rest of what is provably ours.

    Folders of living writers are kept. Without lock support, only complete folders are touched: one gets the name if that is
    free. Folders moved away are deleted if the name is taken, or if their deletion had begun.
    """
    for place in _leftovers(target, "tmp"):
        with writer_of(place) as writer:
            if writer is not Writer.ALIVE and _promote(place, target):
                continue
        delete_abandoned(place, target.name)
    for place in _leftovers(target, "old"):
        if delete_if_empty(place):  # the last step of its deletion
            continue
        gone = not os.path.lexists(place / MANIFEST)
        if not _promote(place, target) and (gone or os.path.lexists(target)) and why_kept(place, target.name) is None:
            _delete(place)


def _leftovers(target: Path, kind: str) -> list[Path]:
    pattern = re.compile(re.escape(f".{target.name}.") + rf"{_IDENTITY}\.{kind}")
    try:
        return sorted(target.with_name(name) for name in os.listdir(target.parent) if pattern.fullmatch(name))
    except OSError:
        return []


def _promote(place: Path, target: Path) -> bool:
    """Rename a leftover to its final name if every byte of it is intact."""
    entry = read_entry(place)
    if entry.problem is not None or os.path.lexists(target) or why_kept(place, target.name) is not None:
        return False
    try:
        entry.verify()
        with directory_lock(target.parent):
            if os.path.lexists(target):
                return False
            patiently(os.rename, place, target)
    except CheckpointError:
        return False
    except OSError as error:
        warn(f"{place}: a complete checkpoint that can't be renamed to {target.name} ({error.strerror})")
        return False
    return True


def _mark(entry: Path) -> None:
    """Add a marker to an entry of version 1, so that an interrupted deletion can be told from a replacement."""
    with contextlib.suppress(OSError):  # the disk is full: continue without
        lock = write_marker(entry, entry.name, new_identity())
        if lock is not None:
            lock.close()


def _set_aside(entry: Path) -> Path:
    leaving = entry.with_name(f".{entry.name}.{new_identity()}.old")
    patiently(os.rename, entry, leaving)
    return leaving


def _delete_replaced(_: Path, replaced: Path | None) -> None:
    if replaced is not None:
        _delete(replaced)


def _delete(place: Path) -> None:
    if place.is_symlink() or place.is_file():
        place.unlink(missing_ok=True)
    else:
        delete_folder(place, last=MARKER if identity_of(place) is not None else MANIFEST)
