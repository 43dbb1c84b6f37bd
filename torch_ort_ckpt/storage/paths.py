"""Paths are local. URLs are refused: as a path, `s3://bucket/run` would become a folder called `s3:` in the working directory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import CheckpointError, UnsupportedError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")  # a scheme has at least two letters: a single one is a Windows drive
_URL_AS_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")  # pathlib collapses two slashes into one


def refuse_url(path: Any, field: str | None = None) -> None:
    """Raise for a URL (text, or a `Path` made from one). Accepts everything else."""
    if isinstance(path, str):
        found = _URL.match(path)
    elif isinstance(path, os.PathLike):
        found = _URL_AS_PATH.match(os.fsdecode(path)) or _URL.match(os.fsdecode(path))
    else:
        return
    if found:
        raise UnsupportedError(
            "a URL, and remote storage is not supported yet",
            path=os.fsdecode(path),
            field=field,
            remedy="Copy the files to a local or mounted folder. If it is the name of a local folder, give its absolute path.",
        )


PathLike: TypeAlias = str | os.PathLike[str]


def as_path(path: Any) -> Path:
    """A path given by the user, as `Path`. Anything else (bytes, a number, an open file) is refused here, not by the operating system,
    which would treat a number as a file descriptor."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        kind = f"{type(path).__name__}{' of bytes' if text is not None else ''}"
        remedy = "Pass the name of a file or folder."
        if isinstance(path, bytes) or text is not None:
            remedy = "Decode it with os.fsdecode()."
        elif hasattr(path, "read"):
            remedy = "Pass the name of the file; data in memory must be written to a file first."
        raise CheckpointError(f"expected a path (text or os.PathLike), not {kind}", remedy=remedy)
    if "\0" in text:
        raise CheckpointError("a path with a zero character in it", path=text, remedy="Check where the path comes from.")
    refuse_url(path)
    return Path(text)


_NOT_IN_NAMES = re.compile(r'[<>:"/\\|?*\x00-\x1f]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³])(\..*)?", re.IGNORECASE)


def refuse_unportable(names: Iterable[str], path: PathLike) -> None:
    """Raise for file names that Windows does not have, and for two that differ only in case, which are one file on Windows and macOS: what
    is written on Linux must open there."""
    seen: dict[str, str] = {}
    for name in names:
        reason = None
        if found := _NOT_IN_NAMES.search(name):
            reason = f"has {found[0]!r} in it"
        elif name.endswith((".", " ")):
            reason = "ends in a dot or space"
        elif _RESERVED.fullmatch(name):
            reason = "is reserved on Windows"
        elif (other := seen.setdefault(name.casefold(), name)) != name:
            reason = f"is {other!r} where case is ignored (Windows, macOS)"
        if reason is not None:
            raise UnsupportedError(f"can't be a file name on every system: {reason}", path=path, field=repr(name), remedy="Rename it.")


def refuse_existing(path: PathLike, overwrite: bool, field: str | None = None) -> None:
    """Raise if something is at the path that `overwrite` does not allow to replace."""
    if not overwrite and os.path.lexists(path):
        raise already_there(path, field)


def already_there(path: PathLike, field: str | None = None) -> CheckpointError:
    return CheckpointError("exists already", path=path, field=field, remedy="Pass overwrite=True (--overwrite) to replace it.")
