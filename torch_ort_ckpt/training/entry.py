"""One entry of a checkpoint directory: a folder that holds an ordinary ORT checkpoint and, beside it, the rest of a training's state.

| file | what |
|---|---|
| `checkpoint` | parameters, buffers, moments, step: what ORT's own loader reads |
| `training.json`, `training.safetensors` | what all ranks share: optimizer, scheduler, scaler, counters; tensors refer to `checkpoint` |
| `rank_<r>.json`, `rank_<r>.safetensors` | what is each rank's own: random generators, position in the data, half-accumulated gradients |
| `manifest.json` | written last: every file with its size and checksum, step, metrics |
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError, CorruptFileError, MissingFileError
from ..formats import load, save
from ..formats.safetensors_file import read_file, write_file
from ..state import CheckpointState
from ..storage import FileBuffer, atomic_write, fsync_directory
from . import tree

CHECKPOINT, SHARED, MANIFEST = "checkpoint", "training", "manifest.json"
VERSION = 1
_BLOCK = 4096  # a sector: two that changed places are noticed


@dataclass(frozen=True)
class FileRecord:
    size: int
    checksum: str


@dataclass(frozen=True)
class Entry:
    """What the manifest says. `problem` is None for a complete entry, else why it is not one."""

    path: Path
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    ranks: int = 1
    created: float = 0.0
    problem: str | None = None

    @property
    def checkpoint(self) -> Path:
        """The ORT checkpoint inside."""
        return self.path / CHECKPOINT

    @property
    def nbytes(self) -> int:
        return sum(record.size for record in self.files.values())

    def verify(self) -> None:
        """Read every byte and compare it with the manifest; raises what is wrong."""
        if self.problem is not None:
            raise CorruptFileError(self.problem, path=self.path)
        for name, record in self.files.items():
            if checksum(self.path / name) != record.checksum:
                raise CorruptFileError("its bytes are not those that were written", path=self.path / name)

    def state(self) -> CheckpointState:
        return load(self.checkpoint, format="ort")

    def shared(self, state: CheckpointState) -> Any:
        """What all ranks share; `state` is the entry's own, which it refers to."""
        return _read_tree(self.path, SHARED, state)

    def local(self, rank: int) -> Any:
        """What that rank had to itself."""
        return _read_tree(self.path, f"rank_{rank}", None)


def read_entry(path: Path) -> Entry:
    """Look at an entry without reading its data: manifest, presence and sizes of the files."""
    named = re.search(r"checkpoint_(\d+)", path.name)
    step = int(named[1]) if named else -1
    try:
        with open(path / MANIFEST, encoding="utf-8") as file:
            content = json.load(file)
        if content["version"] != VERSION:
            return Entry(path, step, problem=f"written by another version of this library (manifest version {content['version']})")
        entry = Entry(
            path=path,
            step=int(content["step"]),
            metrics={name: float(value) for name, value in content["metrics"].items()},
            files={name: FileRecord(int(record["size"]), str(record["checksum"])) for name, record in content["files"].items()},
            ranks=int(content["ranks"]),
            created=float(content["created"]),
        )
    except FileNotFoundError:
        return Entry(path, step, problem="no manifest: not a complete entry")
    except OSError as error:
        return Entry(path, step, problem=f"the manifest can't be read ({error.strerror})")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Entry(path, step, problem=f"damaged manifest ({type(error).__name__}: {error})")
    for name, record in entry.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            return Entry(path, step, entry.metrics, entry.files, problem=f"{name}: {error.strerror}")
        if size != record.size:
            return Entry(path, step, entry.metrics, entry.files, problem=f"{name}: {size} bytes, written were {record.size}")
    return entry


def write_state(folder: Path, state: CheckpointState, durable: bool) -> dict[str, FileRecord]:
    """The ORT file. Several optimizer groups are kept apart: ORT's loader reads them too. Half-precision aliases, which it does not read,
    are left out: their masters say the same."""
    groups = "keep" if len(state.optimizer) > 1 else "single"
    save(state, folder / CHECKPOINT, format="ort", durable=durable, groups=groups)
    return _records(folder, [name for name in (CHECKPOINT, CHECKPOINT + ".data") if (folder / name).exists()])


def write_tree(folder: Path, name: str, form: Any, tensors: Mapping[str, torch.Tensor], durable: bool) -> dict[str, FileRecord]:
    """One encoded tree: `<name>.json` and `<name>.safetensors`."""
    data = folder / f"{name}.safetensors"
    with atomic_write(data, durable=durable) as file:
        write_file(file, tensors, {}, data)
    write_json(folder / f"{name}.json", form, durable)
    return _records(folder, [f"{name}.json", data.name])


def write_manifest(
    folder: Path, step: int, ranks: int, metrics: Mapping[str, float], files: Mapping[str, FileRecord], durable: bool
) -> None:
    content = {
        "version": VERSION,
        "step": step,
        "created": time.time(),
        "ranks": ranks,
        "metrics": {name: float(value) for name, value in metrics.items()},
        "files": {name: {"size": record.size, "checksum": record.checksum} for name, record in sorted(files.items())},
    }
    write_json(folder / MANIFEST, content, durable)
    if durable:
        fsync_directory(folder)


def write_json(path: Path, content: Any, durable: bool) -> None:
    text = json.dumps(content).encode()
    with atomic_write(path, durable=durable) as file:
        file.write(text)


def checksum(path: Path) -> str:
    """SHA-256 over the sums of every 4 KiB block, at memory speed: notices damage, is no defence against forgery."""
    data = np.frombuffer(FileBuffer(path).data, dtype=np.uint8)
    whole = len(data) // _BLOCK * _BLOCK
    digest = hashlib.sha256(str(len(data)).encode())
    if whole:
        digest.update(data[:whole].view(np.uint64).reshape(-1, _BLOCK // 8).sum(axis=1, dtype=np.uint64).tobytes())
    digest.update(data[whole:].tobytes())
    return digest.hexdigest()[:32]


def best_of(entries: list[Entry], metric: str, mode: str) -> Entry | None:
    """The complete entry with the lowest (`min`) or highest value; the newer of equals; NaN never wins."""
    rated = [entry for entry in entries if entry.problem is None and not math.isnan(entry.metrics.get(metric, math.nan))]
    sign = 1 if mode == "min" else -1
    return min(rated, key=lambda entry: (sign * entry.metrics[metric], -entry.step), default=None)


def _records(folder: Path, names: list[str]) -> dict[str, FileRecord]:
    return {name: FileRecord(os.path.getsize(folder / name), checksum(folder / name)) for name in names}


def _read_tree(folder: Path, name: str, state: CheckpointState | None) -> Any:
    path = folder / f"{name}.json"
    try:
        form = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise MissingFileError("no such file", path=path) from error
    except OSError as error:
        raise CheckpointError(f"can't be read ({error.strerror})", path=path) from error
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"not JSON ({error})", path=path) from error
    tensors, _, _ = read_file(folder / f"{name}.safetensors", mmap=True)
    return tree.decode(form, tensors, state, path)
