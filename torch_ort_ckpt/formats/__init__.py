"""Formats: one module each, with the same few verbs, and `detect` / `load` / `save` over them.

A format module has

- `matches(path) -> bool`: does this file or folder look like mine? Cheap, by content; imports nothing optional.
- `read(path, *, mmap, **options) -> CheckpointState`
- `write(state, path, *, durable, progress, **options) -> None`: the state is already reduced to what the caller asked for
  (`include_optimizer`, `include_mixed_precision`). Read-only formats have none.
- `SUFFIXES`: what `format_for` recognises in a destination's name.

Modules are imported when first needed, so that optional packages stay optional.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import CheckpointError, MissingFileError, UnsupportedError
from ..names import check_aliases
from ..state import CheckpointState
from ..storage import PathLike, Progress, warn

FORMATS: tuple[str, ...] = ("ort", "safetensors", "torch", "dcp")
"""Names of all formats, in the order in which `detect` asks them."""


def detect(path: PathLike) -> str:
    """Which format this file or folder is in, from its content."""
    place = Path(path)
    if not place.exists():
        raise MissingFileError("no such file or folder", path=path)
    for name in FORMATS:
        if module(name).matches(place):
            return name
    raise CheckpointError(
        "not a checkpoint in any known format", path=path, remedy=f"If you know better, pass format= one of {', '.join(FORMATS)}."
    )


def load(
    path: PathLike | Sequence[PathLike], format: str | None = None, mmap: bool = True, *, strict: bool = False, **options: Any
) -> CheckpointState:
    """Read a checkpoint of any format.

    With `mmap=True` tensors alias the mapped file copy-on-write: nothing is read until touched, the file never changes, and a file that
    is renamed or deleted keeps serving. A file that another program overwrites *in place* (ORT does) does not: use `mmap=False` then.
    `strict=True` turns a half-precision alias that disagrees with its master into an error. Other options belong to the format.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise UnsupportedError("a list of paths is a rank set, which this format does not have", remedy="Pass one path.")
    name = format or detect(path)
    state: CheckpointState = _call(module(name).read, name, Path(path), mmap=mmap, **options)
    if strict:
        check_aliases(state, path=path)
    return state


def save(
    state: CheckpointState,
    path: PathLike,
    format: str = "ort",
    include_optimizer: bool = True,
    include_mixed_precision: bool = False,
    overwrite: bool = True,
    durable: bool = True,
    *,
    strict: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> None:
    """Write a checkpoint: atomically (the old file or the new one, never a mixture) and, with `durable`, synced to the medium.

    Half-precision aliases are left out unless `include_mixed_precision`; one that disagrees with its master is written as the master
    rounds (with a warning), or refused with `strict=True`. Other options belong to the format.
    """
    writer = getattr(module(format), "write", None)
    if writer is None:
        raise UnsupportedError(f"format {format!r} can be read, not written", path=path)
    if not overwrite and os.path.lexists(path):
        raise CheckpointError("exists already", path=path, remedy="Pass overwrite=True (--overwrite) to replace it.")
    state = dataclasses.replace(
        state,
        optimizer=dict(state.optimizer) if include_optimizer else {},
        mixed_precision=dict(state.mixed_precision) if include_mixed_precision else {},
    )
    if strict:
        check_aliases(state, path=path)
    elif stale := state.refresh_mixed_precision():
        warn(f"{path}: {len(stale)} stale half-precision aliases are written as their masters round: {', '.join(stale[:5])}")
    _call(writer, format, state, Path(path), durable=durable, progress=progress, **options)


def format_for(path: PathLike) -> str:
    """The format a destination's name asks for; `ort` (whose files have no suffix) where it has no suffix."""
    text = os.fspath(path).rstrip("/\\")
    matching = [(len(suffix), name) for name in FORMATS for suffix in module(name).SUFFIXES if text.endswith(suffix)]
    if matching:
        return max(matching)[1]
    if not Path(text).suffix:
        return "ort"
    raise CheckpointError("can't tell a format from this name", path=path, remedy=f"Pass format= (--to) one of {', '.join(FORMATS)}.")


def module(name: str) -> ModuleType:
    """The format's module, imported on first use."""
    if name not in FORMATS:
        raise CheckpointError(f"unknown format {name!r}", remedy=f"Known: {', '.join(FORMATS)}.")
    return importlib.import_module(f".{name}", __name__)


def _call(function: Any, name: str, *args: Any, **options: Any) -> Any:
    known = inspect.signature(function).parameters
    if unknown := sorted(set(options) - set(known)):
        own = sorted(key for key in known if key not in ("state", "path", "mmap", "durable", "progress"))
        raise CheckpointError(f"format {name!r} has no option {', '.join(unknown)}", remedy=f"It has: {', '.join(own) or 'none'}.")
    return function(*args, **options)
