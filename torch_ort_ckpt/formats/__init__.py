"""Formats: one module each, with the same few verbs, and `detect` / `load` / `save` over them.

A format module has

- `matches(path) -> bool`: whether the file or folder is in this format. Cheap, by content; imports nothing optional.
- `read(path, *, mmap, **options) -> CheckpointState`
- `write(state, path, *, durable, progress, **options) -> None`: the state is already reduced to what the caller asked for
  (`include_optimizer`, `include_mixed_precision`). Read-only formats have none.
- `SUFFIXES`: what `format_for` recognises in a destination's name.
- `READ_BY`: the ORT releases that read it, where there are any; `read_by(path) -> str` where that depends on what is inside.

Modules are imported when first needed, so that optional packages stay optional.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib
import inspect
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

from ..catalog import FORMATS as FORMATS
from ..catalog import WRITABLE as WRITABLE
from ..checkpoint.merging import merge_ranks
from ..checkpoint.names import check_aliases
from ..checkpoint.properties import WORLD_RANK
from ..checkpoint.selection import on_device, selected, usable_device
from ..checkpoint.state import CheckpointState
from ..errors import CheckpointError, UnsupportedError
from ..storage.buffers import opening, readable
from ..storage.files import Progress, warn
from ..storage.folders import surviving
from ..storage.paths import PathLike, already_there, as_path
from .savable import check_savable
from .soundness import check_loaded

_MODULES = {name: f".legacy.{name}" if name in ("runner", "pbseq", "ortcp", "ortpt") else f".{name}.checkpoint" for name in FORMATS}

_INDEX = ".index.json"
"""What the index of a sharded `<name>.safetensors` is called: `<name>.safetensors.index.json`."""

_INSIDE = "checkpoint"
_AROUND = ("manifest.json", "training_model.onnx", "training_model.ort", "eval_model.onnx", "eval_model.ort")
"""A folder with `checkpoint` and one of these, an entry of a checkpoint directory or artifacts, stands for that checkpoint."""

_FOLDERS = ("pbseq", "runner", "dcp")
"""Formats whose checkpoints are folders, always."""


def detect(path: PathLike) -> str:
    """Which format this file or folder is in, from its content. For a folder of rank files: theirs."""
    with readable(path):
        return _detect(path)


def _detect(path: PathLike) -> str:
    place = _found(path)
    with opening(path, "file or folder"):
        mode = place.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a FIFO would wait for a writer
        raise CheckpointError("neither a regular file nor a folder", path=path, remedy="Copy its content to a file first.")
    if (name := _match(place)) is not None:
        return name
    kinds = {kind for _, kind in _members(place)}
    if len(kinds) == 1:
        return kinds.pop()
    raise CheckpointError(
        "an empty file, not a checkpoint in any known format"
        if stat.S_ISREG(mode) and not place.stat().st_size
        else "not a checkpoint in any known format",
        path=path,
        remedy=f"Pass the format explicitly (format=; --from, --format on the command line): one of {', '.join(FORMATS)}.",
    )


def load(
    path: PathLike | Sequence[PathLike],
    format: str | None = None,
    mmap: bool = True,
    *,
    device: torch.device | str | None = None,
    only: Sequence[str] | None = None,
    strict: bool = False,
    **options: Any,
) -> CheckpointState:
    """Read a checkpoint of any format. A list, a folder or a glob of rank files is read as one state (see `merge`).

    With `mmap=True` tensors alias the mapped file copy-on-write: nothing is read until touched, the file never changes, and a file that
    is renamed or deleted stays readable. On Windows, where a mapped file can't be replaced, it is read instead.
    If another program overwrites the file *in place* (as ORT does), use `mmap=False`.
    `device` moves the tensors there. `only` keeps the parameters with these names or patterns (`["fc.weight", "encoder.*"]`), with their
    moments and aliases; the others are not read from a mapped file.
    `strict=True` turns a half-precision alias that disagrees with its master into an error. Other options belong to the format.
    """
    target = None if device is None else usable_device(device)
    single = path if isinstance(path, (str, os.PathLike)) else None
    with readable(path):
        ranks = _ranks(path, format)
    if ranks is None:
        place = _found(cast(PathLike, path))
        name = format or detect(place)
        with readable(place):
            state: CheckpointState = _call(module(name).read, name, place, mmap=mmap, **options)
        check_loaded(state, place)
    else:
        state = _load_ranks(path, ranks, format=format, mmap=mmap, **options)
    if only is not None:
        state = selected(state, only, single)
    if strict:
        check_aliases(state, path=single)
    return state if target is None else on_device(state, target)


def merge(
    states_or_paths: Sequence[CheckpointState | PathLike] | PathLike,
    *,
    stages: bool = False,
    format: str | None = None,
    mmap: bool = True,
    **options: Any,
) -> CheckpointState:
    """One state from all ranks of a partitioned set (ZeRO, Megatron, pipeline stages), in any order, with one rank in memory at a time.

    Ranks contain their position. `stages=True` is for pipeline stages that do not: they keep the order given. A single path is a folder
    or a glob of all of them.
    """
    if not isinstance(states_or_paths, Sequence) or isinstance(states_or_paths, (str, bytes, bytearray)):
        states_or_paths = as_path(states_or_paths)
        if os.path.isdir(states_or_paths) or not os.path.exists(states_or_paths):
            return load(states_or_paths, format, mmap, **options)
        states_or_paths = [states_or_paths]

    def source(item: CheckpointState | PathLike) -> Callable[[], CheckpointState]:
        if isinstance(item, CheckpointState):
            return lambda: item
        return lambda: load(item, format, mmap, **options)

    labels = [f"state {n}" if isinstance(item, CheckpointState) else os.fspath(as_path(item)) for n, item in enumerate(states_or_paths)]
    return merge_ranks([source(item) for item in states_or_paths], labels, stages=stages)


def save(
    state: CheckpointState,
    path: PathLike,
    format: str | None = None,
    include_optimizer: bool = True,
    include_mixed_precision: bool = False,
    overwrite: bool = True,
    durable: bool = True,
    *,
    strict: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> None:
    """Write a checkpoint: atomically (the old file or the new one, never a mixture) and, with `durable`, synced to disk.

    The format follows the suffix of `path` unless given; without a suffix it is `ort`, and an unknown one is an error.
    Half-precision aliases are left out unless `include_mixed_precision`; one that disagrees with its master is written as the master
    rounds (with a warning), or refused with `strict=True`. Other options belong to the format.
    """
    place = as_path(path)
    if not isinstance(state, CheckpointState):
        raise CheckpointError(
            f"expected a CheckpointState, not {type(state).__name__}",
            path=path,
            remedy="Make one: toc.from_torch(model, optimizer), model.checkpoint(optimizer), or CheckpointState(trainable={...}).",
        )
    format = format or format_for(path)
    writer = getattr(module(format), "write", None)
    if writer is None:
        raise UnsupportedError(
            f"format {format!r} can be read, not written", path=path, remedy="Write another format: convert to ort, safetensors or torch."
        )
    if not overwrite and exists(path):
        raise already_there(path)
    state = dataclasses.replace(
        state,
        optimizer=dict(state.optimizer) if include_optimizer else {},
        mixed_precision=dict(state.mixed_precision) if include_mixed_precision else {},
    )
    check_savable(state, path)
    if strict:
        check_aliases(state, path=path)
    elif stale := state.refresh_mixed_precision():
        warn(f"{path}: {len(stale)} stale half-precision aliases are replaced by their rounded masters: {', '.join(stale[:5])}")
    _call(writer, format, state, place, durable=durable, progress=progress, **options)


def exists(path: PathLike) -> bool:
    """Whether a checkpoint, or anything else, is there: also as shards with an index, or in a folder whose save was interrupted."""
    return os.path.lexists(_found(path, quiet=True))


def format_for(path: PathLike) -> str:
    """The format for a destination's name; `ort` (whose files have no suffix) if it has no suffix."""
    text = os.fspath(as_path(path)).rstrip("/\\")
    if "." not in os.path.basename(text):
        return "ort"
    matching = [(len(suffix), name) for name in FORMATS for suffix in module(name).SUFFIXES if text.lower().endswith(suffix)]
    if matching:
        return max(matching)[1]
    if not Path(text).suffix:
        return "ort"
    raise CheckpointError(
        "can't tell a format from this name", path=path, remedy=f"Pass format= (of convert: to_format=, --to) one of {', '.join(WRITABLE)}."
    )


def inside_folder(folder: PathLike, source: PathLike, format: str) -> Path:
    """Where a conversion of `source` goes that is to be put into `folder`: under the source's name with the format's suffix. A checkpoint
    that is a folder itself is that folder."""
    if format in _FOLDERS:
        return as_path(folder)
    name = as_path(source).name
    known = [suffix for kind in FORMATS for suffix in module(kind).SUFFIXES if suffix and name.endswith(suffix) and name != suffix]
    suffix = "" if format == "ort" else module(format).SUFFIXES[0]
    return as_path(folder) / (name.removesuffix(max(known, key=len, default="")) + suffix)


def read_by(name: str, path: PathLike | None = None) -> str:
    """The ORT releases that read this format as it is; with `path`, this very file or folder, and why not others."""
    own = module(name)
    if path is None or not hasattr(own, "read_by"):
        return str(getattr(own, "READ_BY", "no release of ORT"))
    files = _ranks(path, name) or [path]
    return "; ".join(dict.fromkeys(str(own.read_by(_found(file))) for file in files))


def module(name: str) -> ModuleType:
    """The format's module, imported on first use."""
    if name not in FORMATS:
        raise CheckpointError(f"unknown format {name!r}", remedy=f"Known: {', '.join(FORMATS)}.")
    return importlib.import_module(_MODULES[name], __name__)


def _found(path: PathLike, *, quiet: bool = False) -> Path:
    """Where the checkpoint at `path` is: there, in a folder whose save was interrupted, inside an entry of a checkpoint directory or a
    folder of artifacts, or under the other name of a safetensors file: the index of its shards, and the other way round."""
    place = surviving(path, quiet=quiet)
    if os.path.isdir(place) and (place / _INSIDE).is_file() and any((place / name).is_file() for name in _AROUND):
        return place / _INSIDE
    text = os.fspath(place)
    is_index = text.lower().endswith(_INDEX)
    single = text[: -len(_INDEX)] if is_index else text
    if os.path.lexists(place) or not single.lower().endswith(".safetensors"):
        return place
    other = Path(single if is_index else f"{single}{_INDEX}")
    return other if os.path.lexists(other) else place


def _ranks(path: PathLike | Sequence[PathLike], format: str | None) -> list[PathLike] | None:
    """The files of a rank set; None for a single checkpoint."""
    if isinstance(path, Sequence) and not isinstance(path, (str, bytes, bytearray)):
        return list(path)
    place = _found(path)
    if os.path.isdir(place):
        if format in _FOLDERS or _match(place) is not None:
            return None
        members = [member for member, kind in _members(place) if format in (None, kind)]
        return [*members] if len({kind for _, kind in _members(place)}) == 1 else None
    pattern = os.fspath(path)
    if glob.has_magic(pattern) and not os.path.lexists(pattern) and (found := sorted(glob.glob(pattern))):
        return [*found]
    return None


def _load_ranks(path: PathLike | Sequence[PathLike], ranks: list[PathLike], **options: Any) -> CheckpointState:
    single = isinstance(path, (str, os.PathLike))
    if single and len(ranks) == 1:
        state = load(ranks[0], **options)
        if WORLD_RANK not in state.properties:  # a folder with one whole checkpoint in it
            return state
    try:
        return merge(ranks, **options)
    except CheckpointError as error:
        if single and error.field == WORLD_RANK and os.path.isdir(cast(PathLike, path)):
            raise CheckpointError(
                f"holds {len(ranks)} checkpoints that are not ranks of one run: {', '.join(Path(rank).name for rank in ranks[:5])}",
                path=cast(PathLike, path),
                remedy="Name one of them. Pipeline stages that do not say their place: merge(..., stages=True), --stages.",
            ) from error
        if error.path is None and isinstance(path, (str, os.PathLike)):
            error.path = os.fspath(path)
        raise


def _match(place: Path) -> str | None:
    return next((name for name in FORMATS if module(name).matches(place)), None)


def _members(folder: Path) -> list[tuple[Path, str]]:
    """The checkpoints in a folder, with their formats. Hidden files are temporaries of saves."""
    if not os.path.isdir(folder):
        return []
    places = sorted(place for place in folder.iterdir() if not place.name.startswith(".") and (place.is_file() or place.is_dir()))
    found = [(place, kind) for place in places if (kind := _match(place)) not in (None, "onnx")]  # a model next to them is not a rank
    return [(place, kind) for place, kind in found if not getattr(module(kind), "is_part", _never)(place)]


def _never(path: Path) -> bool:
    return False


def _call(function: Any, name: str, *args: Any, **options: Any) -> Any:
    known = inspect.signature(function).parameters
    if unknown := sorted(set(options) - set(known)):
        own = sorted(key for key in known if key not in ("state", "path", "mmap", "durable", "progress"))
        raise CheckpointError(f"format {name!r} has no option {', '.join(unknown)}", remedy=f"It has: {', '.join(own) or 'none'}.")
    return function(*args, **options)
