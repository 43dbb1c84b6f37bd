"""What the commands that write share: options of the formats, sizes for progress bars, and how they say what they did."""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

from rich.markup import escape

from ..checkpoint.backing import files_behind
from ..checkpoint.state import CheckpointState
from ..errors import CheckpointError, printable
from ..storage.paths import PathLike, as_path

_SHARD = re.compile(r"-\d{5}-of-\d{5}(\.safetensors)$")


def writing_options(options: argparse.Namespace, target: str) -> dict[str, Any]:
    owners = {
        "external_data": ("ort", "onnx"),
        "groups": ("ort", "pbseq"),
        "version": ("ort",),
        "max_shard_size": ("safetensors",),
        "model": ("onnx",),
    }
    chosen = {name: getattr(options, name, None) for name in owners}
    for name, value in chosen.items():
        if value is not None and target not in owners[name]:
            raise CheckpointError(
                f"--{name.replace('_', '-')} is for format {owners[name][0]!r}, the destination is {target!r}",
                remedy="Leave the option out, or choose the format with --to.",
            )
    return {name: value for name, value in chosen.items() if value is not None}


def size_of(path: str) -> int:
    """Bytes on disk, for progress bars; 0 (unknown) where it can't be told."""
    try:
        if os.path.isdir(path):
            return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
        return os.path.getsize(path) + (os.path.getsize(f"{path}.data") if os.path.exists(f"{path}.data") else 0)
    except OSError:
        return 0


def written_files(path: PathLike, state: CheckpointState) -> list[str]:
    """The files that a saved checkpoint consists of; `state` is what was loaded from it."""
    place = as_path(path)
    parts = sorted(os.fspath(file) for file in files_behind(state))
    indices = [index for file in parts if (index := _SHARD.sub(r"\1.index.json", file)) != file]
    return list(dict.fromkeys([*([os.fspath(place)] if place.is_file() else []), *indices, *parts]))


def escaped(text: str) -> str:
    return escape(printable(text))


def contents(state: CheckpointState) -> str:
    return escaped(repr(state).removeprefix("CheckpointState(").removesuffix(")"))
