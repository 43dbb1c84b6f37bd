"""`ortpt` (read only): the `torch.save` files of ORTTrainer's `experimental_save_checkpoint`, `<prefix>.ort.pt`.

`{"model": flat, ...user keys}`, where flat has `<w>`, `<w>_fp16`, `Moment_1_<w>`, `Update_Count_<w>`, `Step`. With ZeRO there is a file
per rank, `<prefix>.ZeRO.<rank>.<world size - 1>.ort.pt`, and `_view_<n>` ends the names of what was cut.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from ...checkpoint import properties as names
from ...checkpoint.backing import backed_by
from ...checkpoint.state import CheckpointState, PartitionInfo, Value
from ...errors import CheckpointError, CorruptFileError
from ...storage.buffers import FileBuffer
from ...storage.files import warn
from ..torch import archive as torch_archive
from . import moments
from .runner import from_flat

SUFFIXES = (".ort.pt",)
READ_BY = "ORTTrainer's experimental_load_checkpoint of ORT 1.3 to 1.14"

_RANK = re.compile(r"\.ZeRO\.(\d{1,9})\.(\d{1,9})\.ort\.pt$")
_VIEW = re.compile(r"(.*)_view_(\d{1,9})$", re.DOTALL)
MARKS = (b"Moment_1_", b"Update_Count_")
"""In the pickle of every such file that has optimizer state."""
_OURS = b"torch_ort_ckpt"  # in what format `torch` writes, whose weights may have any names


def matches(path: Path) -> bool:
    """By name, or for a renamed file by the optimizer state in it."""
    try:
        if path.name.lower().endswith(SUFFIXES):
            return path.is_file()
        with open(path, "rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"
        return zipped and _has_marks(path)
    except torch_archive.ZIP_ERRORS:
        return False


def read(path: Path, *, mmap: bool = True) -> CheckpointState:
    """Read one file (one rank, where its name says so). Its checksums are always compared: these files are old, and small."""
    buffer = FileBuffer(path, mmap=mmap)
    state = _state(torch_archive.load(buffer, checksums=True), path)
    backed_by(state, [buffer])
    return state


def _state(content: Any, path: Path) -> CheckpointState:
    flat = content.pop("model", None) if isinstance(content, dict) else None
    if not isinstance(flat, dict) or not all(isinstance(name, str) and _is_plain(value) for name, value in flat.items()):
        raise CorruptFileError("no `model` with named tensors in it", path=path)
    properties = _user_properties(content, path)
    place = _RANK.search(path.name)
    pieces = {name for name in flat if _VIEW.match(name)}
    if place is None:
        if pieces:
            raise CheckpointError(
                "a rank of a ZeRO set, but its name does not say which",
                path=path,
                field=min(pieces),
                remedy="Name it <prefix>.ZeRO.<rank>.<last rank>.ort.pt.",
            )
        return from_flat(dict(flat), properties, path)
    rank, last = int(place[1]), int(place[2])
    if rank > last:
        raise CheckpointError(f"rank {rank} of {last + 1}", path=path, remedy="The name must end in .ZeRO.<rank>.<last rank>.ort.pt.")
    properties |= {
        names.WORLD_RANK: rank,
        names.WORLD_SIZE: last + 1,
        names.DATA_PARALLEL_SIZE: last + 1,
        names.HORIZONTAL_PARALLEL_SIZE: 1,
        names.ZERO_STAGE: 1,
    }
    return _rank_state(flat, properties, path)


def _rank_state(flat: dict[str, torch.Tensor], properties: dict[str, Any], path: Path) -> CheckpointState:
    whole: dict[str, Value] = {}
    cut: set[str] = set()
    for name, value in flat.items():
        view = _VIEW.match(name)
        plain = view[1] if view else name
        if plain in whole:
            raise CorruptFileError("in the file twice, whole and in part", path=path, field=plain)
        whole[plain] = value
        if view:
            cut.add(plain)
    state = from_flat(whole, properties, path)
    state.trainable |= state.frozen  # other ranks may hold the moments
    state.frozen = {}
    state.properties[names.MIXED_PRECISION] = int(bool(state.mixed_precision))
    for name in sorted(cut):
        weight = next(
            (name.removeprefix(f"{prefix}_") for prefix in (*moments.OURS, moments.UPDATE_COUNT) if name.startswith(f"{prefix}_")), name
        )
        state.partitions[weight] = PartitionInfo(_original_shape(state, weight, cut, path))
    return state


def _original_shape(state: CheckpointState, weight: str, cut: set[str], path: Path) -> tuple[int, ...]:
    """Masters are cut only in mixed precision, where the alias is whole."""
    source = state.mixed_precision.get(weight)
    if source is None and weight not in cut:
        source = state.parameters.get(weight)
    if source is None:
        raise CorruptFileError("only a piece, and nothing that tells the shape of the whole", path=path, field=weight)
    return tuple(source.shape)


def _user_properties(content: dict[Any, Any], path: Path) -> dict[str, Any]:
    """The user's own keys: numbers and text as they are, other plain data as JSON."""
    properties: dict[str, Any] = {}
    lost = []
    for key, value in content.items():
        if isinstance(value, bool):
            properties[str(key)] = int(value)
        elif isinstance(value, (int, float, str)):
            properties[str(key)] = value
        else:
            try:
                properties[str(key)] = json.dumps(value)
            except (TypeError, ValueError, RecursionError):
                lost.append(str(key))
    if lost:
        warn(f"{path}: left out, since properties are numbers and text: {', '.join(sorted(lost)[:5])}")
    return properties


def _is_plain(value: Any) -> bool:
    """An ordinary tensor, no larger than what the file has for it (strides of zero would make any size)."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized or value.is_meta:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _has_marks(path: Path) -> bool:
    with torch_archive.opened(path) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith("/data.pkl") and entry.compress_type == zipfile.ZIP_STORED:
                content = archive.read(entry)
                return any(mark in content for mark in MARKS) and _OURS not in content
    return False
