"""Paths are local. URLs are refused: as a path, `s3://bucket/run` would become a folder called `s3:` in the working directory."""

from __future__ import annotations

import os
import re
from typing import Any

from ..errors import UnsupportedError

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
