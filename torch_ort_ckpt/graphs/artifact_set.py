"""The files of an artifacts folder change together (see `storage/staging.py`), and existing ones are replaced only on request."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..errors import CheckpointError
from ..storage import staging

_NAME = "artifacts"

current_files = partial(staging.current_files, name=_NAME)
"""Every file of a folder by name, and its path, after an interrupted export too."""


def pending_set(folder: Path, owns: Callable[[str], bool], *, overwrite: bool) -> contextlib.AbstractContextManager[staging.PendingSet]:
    """A `PendingSet` that leaves nothing behind unless it is committed. `owns` tells whether a name belongs to the set."""
    return staging.pending_set(folder, _NAME, owns, partial(refuse_existing, folder, owns, overwrite))


def refuse_existing(folder: Path, owns: Callable[[str], bool], overwrite: bool) -> None:
    """Existing artifacts are replaced only on request."""
    found = [] if overwrite else sorted(filter(owns, current_files(folder)))
    if found:
        raise CheckpointError(
            f"already holds artifacts ({', '.join(found[:4])})",
            path=folder,
            remedy="Pass overwrite=True (--overwrite) to replace them, or choose another folder.",
        )
