"""What must not load, and what must not be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import torch_ort_ckpt as toc
from torch_ort_ckpt.errors import UnsupportedError


def refused(
    path: Path, message: str, kind: type[toc.CheckpointError] = toc.CheckpointError, *, at: Path | str | None = None, **options: Any
) -> toc.CheckpointError:
    """The error of loading `path`, mapped or not. It names the file `at`, or else `path` or a file in it."""
    for mmap in (True, False):
        with pytest.raises(kind, match=message) as caught:
            toc.load(path, mmap=mmap, **options)
        assert caught.value.path is not None
        assert caught.value.path.startswith(str(path)) if at is None else caught.value.path == str(at)
    assert options or not toc.verify(path)
    return caught.value


def why_refused(state: toc.CheckpointState, path: Path, **options: Any) -> str | None:
    """Why the state was not saved; None if it was."""
    try:
        toc.save(state, path, include_mixed_precision=True, durable=False, **options)
    except UnsupportedError as error:
        return error.message
    return None
