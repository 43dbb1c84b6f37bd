"""From any format to any other, streaming: the memory of the largest tensor plus a constant, however large the checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.backing import release_pages
from ..checkpoint.bridge import weight_as
from ..checkpoint.names import NameMap
from ..checkpoint.state import CheckpointState, OptimizerGroup, Value, is_string, nbytes, same_ends, same_tensor
from ..errors import CheckpointError
from ..formats import format_for, inside_folder, load, save
from ..storage.files import Progress
from ..storage.paths import PathLike, as_path, refuse_url
from ..storage.read_back import ReadBack, reading_back

_RELEASE_EVERY = 64 << 20
_SEPARATORS = ("/", os.sep)


def convert(
    source: PathLike,
    destination: PathLike,
    *,
    from_format: str | None = None,
    to_format: str | None = None,
    dtype: torch.dtype | None = None,
    names: NameMap | PathLike | None = None,
    include_optimizer: bool = True,
    include_mixed_precision: bool = False,
    upcast_half: bool = False,
    overwrite: bool = False,
    durable: bool = True,
    verify: bool = True,
    progress: Progress | None = None,
    read_options: dict[str, Any] | None = None,
    **options: Any,
) -> CheckpointState:
    """Convert a checkpoint and return what was written. With `verify`, the result is read back and compared bit for bit.

    Formats come from the source's content and the destination's name unless `from_format` and `to_format` are given. A destination that
    ends in a slash is a folder: the result gets the source's name in it, with the format's suffix. `names` renames and
    transposes weights (a `NameMap` or a JSON file for `NameMap.from_dict`); `dtype` converts floating-point weights. Options belong to
    the destination's format.
    """
    if "to" in options:
        warnings.warn("convert(to=) is now convert(to_format=)", DeprecationWarning, stacklevel=2)
        old = options.pop("to")
        if to_format is not None:
            raise CheckpointError("to_format= and its old name to= are both given", path=destination, remedy="Remove to=.")
        to_format = old
    refuse_url(names)
    place, target = destination_of(source, destination, to_format)
    state = load(source, format=from_format, **(read_options or {}))
    loaded = state
    state = dataclasses.replace(
        state,
        optimizer=state.optimizer if include_optimizer else {},
        mixed_precision=state.mixed_precision if include_mixed_precision else {},
    )
    if upcast_half:
        state.promote_half()
        state.mixed_precision = state.mixed_precision if include_mixed_precision else {}
    if names is not None:
        chosen = names if isinstance(names, NameMap) else read_name_map(names)
        if unknown := sorted({entry.ort for entry in chosen.entries.values()} - state.parameters.keys() - state.mixed_precision.keys()):
            raise CheckpointError(
                f"the checkpoint has no {', '.join(unknown[:5])}",
                path=source,
                field=unknown[0],
                remedy="A name map goes from names in the checkpoint to names in PyTorch: `inspect` shows the former.",
            )
        state = renamed(state, chosen)
    if dtype is not None:
        state = as_dtype(state, dtype)
    if place != as_path(destination):
        os.makedirs(place.parent, exist_ok=True)
    with reading_back() if verify else contextlib.nullcontext() as reader:
        save(
            state,
            place,
            format=target,
            include_mixed_precision=include_mixed_precision,
            overwrite=overwrite,
            durable=durable,
            progress=_releasing([loaded], progress),
            **options,
        )
    if verify:
        _verify(state, place, target, loaded, options, reader)
    return state


def destination_of(source: PathLike, destination: PathLike, to_format: str | None) -> tuple[Path, str]:
    """Where a conversion goes, and in which format. A destination that ends in a slash is the folder to put it into."""
    place = as_path(destination)
    if not os.fspath(destination).endswith(_SEPARATORS):
        return place, to_format or format_for(place)
    target = to_format or format_for(place)
    return inside_folder(place, source, target), target


def renamed(state: CheckpointState, names: NameMap) -> CheckpointState:
    """The state under PyTorch's names, moments and aliases too. Tied names share one tensor."""

    def states(group: OptimizerGroup) -> dict[str, dict[str, Any]]:
        return {
            name: {moment: value.T if turned and value.ndim == 2 else value for moment, value in moments.items()}
            for param, moments in group.states.items()
            for name, turned in names.targets(param)
        }

    return dataclasses.replace(
        state,
        trainable=names.to_torch(state.trainable),
        frozen=names.to_torch(state.frozen),
        mixed_precision=names.to_torch(state.mixed_precision),
        optimizer={name: dataclasses.replace(group, states=states(group)) for name, group in state.optimizer.items()},
    )


def as_dtype(state: CheckpointState, dtype: torch.dtype) -> CheckpointState:
    """Floating-point weights in another precision; moments stay as they are."""

    def many(values: dict[str, Value]) -> dict[str, Value]:
        return {name: value if is_string(value) else weight_as(state, name, value, dtype) for name, value in values.items()}

    return dataclasses.replace(state, trainable=many(state.trainable), frozen=many(state.frozen), mixed_precision={})


def read_name_map(path: PathLike) -> NameMap:
    refuse_url(path)
    try:
        with open(as_path(path), encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"not a readable JSON file ({error})",
            path=path,
            remedy='For example {"onnx::MatMul_12": {"name": "fc.weight", "transpose": true}}.',
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            "must be a JSON object of ORT name -> PyTorch name",
            path=path,
            remedy='For example {"onnx::MatMul_12": {"name": "fc.weight", "transpose": true}}.',
        )
    return NameMap.from_dict(content)


def _releasing(loaded: list[CheckpointState], progress: Progress | None) -> Progress:
    """Report progress, and give back the pages of the source that have been written."""
    held = 0

    def advance(count: int) -> None:
        nonlocal held
        held += count
        if held >= _RELEASE_EVERY:
            held = 0
            release_pages(*loaded)
        if progress:
            progress(count)

    return advance


def _verify(
    state: CheckpointState,
    destination: PathLike,
    target: str,
    loaded: CheckpointState,
    options: dict[str, Any],
    reader: ReadBack | None,
) -> None:
    """Load what was written and compare it. Tensors already read back: only type, shape and both ends, to check that the file's
    index points to them."""
    again = load(destination, format=target)
    read = dict(again.tensors())
    release = _releasing([loaded, again], None)

    def same(name: str, value: Value) -> bool:
        if options.get("groups") == "merge" and name.startswith("optimizer/"):
            return True
        if name not in read:
            return target == "onnx"  # a model holds only tensors it has initializers for; the writer has warned
        if reader and not is_string(value) and value in reader:
            return same_ends(value, read[name])
        release(nbytes(value))
        return same_tensor(value, read[name])

    for name, value in state.tensors():
        if (reader and reader.damaged) or not same(name, value):
            raise CheckpointError(
                "what was read back is not what was written",
                path=destination,
                field=name if not (reader and reader.damaged) else None,
                remedy="Keep the source, and check the disk: the file was changed or damaged after it was written.",
            )
