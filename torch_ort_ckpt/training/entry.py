"""One entry of a checkpoint directory: a folder with an ordinary ORT checkpoint and the rest of the training state.

| file | what |
|---|---|
| `checkpoint` | parameters, buffers, moments, step: what ORT's own loader reads |
| `training.json`, `training.safetensors` | what all ranks share: optimizer, scheduler, scaler, counters; tensors refer to `checkpoint` |
| `rank_<r>.json`, `rank_<r>.safetensors` | state of each rank: random generators, position in the data, partially accumulated gradients |
| `manifest.json` | written last: every file with its size and hash, step, ranks, metrics, and a hash of all that |
| `.torch-ort-ckpt` | written first: proof that this library made the folder and may delete it |
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoint.state import CheckpointState
from ..errors import CheckpointError, CorruptFileError, MissingFileError
from ..formats import load, save
from ..formats.safetensors.file import read_file, write_file
from ..storage.buffers import FileBuffer, open_file
from ..storage.files import atomic_write, fsync_directory
from ..storage.hashing import bytes_hash, file_hash
from . import tree

CHECKPOINT, SHARED, MANIFEST = "checkpoint", "training", "manifest.json"
VERSION = 2
READABLE = (1, 2)
"""Version 1 used sums of words as checksums, and had none of the manifest itself."""

_LARGEST = 16 << 20  # of a manifest: enough for 70,000 ranks
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LAST_STEP, _LAST_SECOND = 2**63 - 1, 253_402_300_799  # the second: of the year 9999


@dataclass(frozen=True)
class FileRecord:
    size: int
    checksum: str


@dataclass(frozen=True)
class Entry:
    """The content of the manifest. `problem` is None for a complete entry, else the reason why it is incomplete."""

    path: Path
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    ranks: int = 1
    created: float = 0.0
    problem: str | None = None
    version: int = 0
    """Of the manifest; 0 when it can't be read."""

    @property
    def checkpoint(self) -> Path:
        """The ORT checkpoint inside."""
        return self.path / CHECKPOINT

    @property
    def nbytes(self) -> int:
        """The size of the entry's files, as its manifest lists them."""
        return sum(record.size for record in self.files.values())

    def verify(self) -> None:
        """Read every file and compare its hash with the manifest; raises on a mismatch."""
        if self.problem is not None:
            raise CorruptFileError(self.problem, path=self.path)
        checksum = file_hash if self.version > 1 else _word_sums
        for name, record in self.files.items():
            if checksum(self.path / name) != record.checksum:
                raise CorruptFileError("its checksum does not match the manifest", path=self.path / name)

    def state(self) -> CheckpointState:
        """The checkpoint in this entry."""
        return load(self.checkpoint, format="ort")

    def shared(self, state: CheckpointState) -> Any:
        """The state shared by all ranks; `state` is the entry's ORT checkpoint, which it refers to."""
        return _read_tree(self.path, SHARED, state)

    def local(self, rank: int) -> Any:
        """The state of that rank."""
        return _read_tree(self.path, f"rank_{rank}", None)


def read_entry(path: Path) -> Entry:
    """Check an entry without reading its data: manifest, presence and sizes of the files. Any fault becomes its `problem`."""
    named = re.search(r"checkpoint_([0-9]+)", path.name)
    step = int(named[1]) if named else -1
    try:
        entry = _parse(path, json.loads(_manifest(path / MANIFEST)))
    except MissingFileError:
        return Entry(path, step, problem="no manifest: not a complete entry")
    except CheckpointError as error:
        return Entry(path, step, problem=f"the manifest: {error.message}")
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        return Entry(path, step, problem=f"damaged manifest ({type(error).__name__}: {error})")
    if entry.version not in READABLE:
        problem = f"written by another version of this library (manifest version {entry.version})"
        return Entry(path, step, problem=problem, version=entry.version)
    problems = (_missing(path, name, record.size) for name, record in entry.files.items())
    return dataclasses.replace(entry, problem=next((text for text in problems if text is not None), None))


def _manifest(path: Path) -> bytes:
    with open_file(os.fspath(path)) as file:
        if os.fstat(file.fileno()).st_size > _LARGEST:
            raise CorruptFileError(f"more than {_LARGEST >> 20} MiB", path=path)
        try:
            return file.read()
        except OSError as error:
            raise CheckpointError(f"can't be read ({error.strerror})", path=path) from error


def _parse(path: Path, content: Any) -> Entry:
    """Parse a manifest. Raises one of the exceptions that `read_entry` expects if it is malformed."""
    version = _whole(content["version"], "version", 1)
    if version not in READABLE:
        return Entry(path, -1, version=version)
    own_hash = content.pop("hash", None)
    if own_hash != (bytes_hash(json.dumps(content, sort_keys=True).encode()) if version > 1 else None):
        raise ValueError("its checksum does not match")
    files = {name: FileRecord(_whole(record["size"], "size", 0), record["checksum"]) for name, record in content["files"].items()}
    if bad := [name for name, record in files.items() if not _FILE_NAME.fullmatch(name) or not isinstance(record.checksum, str)]:
        raise ValueError(f"{bad[0]!r} is not a file of an entry")
    ranks = _whole(content["ranks"], "ranks", 1, max(1, len(files)))
    expected = [CHECKPOINT, *_tree_files(SHARED)]
    if ranks > 1 or "rank_0.json" in files:  # Lightning's checkpoints have none
        expected += [name for number in range(ranks) for name in _tree_files(f"rank_{number}")]
    if missing := [name for name in expected if name not in files]:
        raise ValueError(f"it does not list {missing[0]}")
    return Entry(
        path=path,
        step=_whole(content["step"], "step", 0, _LAST_STEP),
        metrics={name: _number(value, name) for name, value in content["metrics"].items()},
        files=files,
        ranks=ranks,
        created=_number(content["created"], "created", _LAST_SECOND),
        version=version,
    )


def _whole(value: Any, name: str, least: int, most: int = _LAST_STEP) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is not a whole number from {least} to {most}")
    return value


def _number(value: Any, name: str, most: float | None = None) -> float:
    name.encode()  # a lone surrogate is not valid text
    if type(value) not in (int, float) or (most is not None and not 0 <= value <= most):
        raise ValueError(f"{name!r} is not a number" + (f" from 0 to {most}" if most is not None else ""))
    return float(value)


def _missing(folder: Path, name: str, size: int) -> str | None:
    try:
        found = os.stat(folder / name)
    except OSError as error:
        return f"{name}: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return f"{name}: not a regular file"
    return f"{name}: {found.st_size} bytes, expected {size}" if found.st_size != size else None


def write_state(folder: Path, state: CheckpointState, durable: bool) -> dict[str, FileRecord]:
    """Write the ORT file. Several optimizer groups stay separate: ORT's loader reads them too. Half-precision aliases, which it ignores,
    are omitted: they are computed from their masters."""
    groups = "keep" if len(state.optimizer) > 1 else "single"
    save(state, folder / CHECKPOINT, format="ort", durable=durable, groups=groups)
    return _records(folder, [name for name in (CHECKPOINT, CHECKPOINT + ".data") if (folder / name).exists()])


def write_tree(folder: Path, name: str, form: Any, tensors: Mapping[str, torch.Tensor], durable: bool) -> dict[str, FileRecord]:
    """One encoded tree: `<name>.json` and `<name>.safetensors`."""
    plain, data = (folder / file for file in _tree_files(name))
    with atomic_write(data, durable=durable) as file:
        write_file(file, tensors, {}, data)
    write_json(plain, form, durable)
    return _records(folder, [plain.name, data.name])


def _tree_files(name: str) -> tuple[str, str]:
    return f"{name}.json", f"{name}.safetensors"


def write_manifest(
    folder: Path, step: int, ranks: int, metrics: Mapping[str, float], files: Mapping[str, FileRecord], durable: bool
) -> None:
    content = {
        "version": VERSION,
        "step": step,
        "created": time.time(),
        "ranks": ranks,
        "metrics": dict(metrics),
        "files": {name: {"size": record.size, "checksum": record.checksum} for name, record in sorted(files.items())},
    }
    content["hash"] = bytes_hash(json.dumps(content, sort_keys=True).encode())
    write_json(folder / MANIFEST, content, durable)
    if os.path.getsize(folder / MANIFEST) > _LARGEST:
        raise CheckpointError(f"the manifest would be larger than {_LARGEST >> 20} MiB", path=folder, remedy="Pass fewer metrics.")
    if durable:
        fsync_directory(folder)


def write_json(path: Path, content: Any, durable: bool) -> None:
    text = json.dumps(content).encode()
    with atomic_write(path, durable=durable) as file:
        file.write(text)


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as plain numbers by name; raises for what a manifest can't hold."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            name.encode()
            found[name] = float(value)
        except (TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            raise CheckpointError(
                f"not a number by name ({error})", field=f"metrics[{name!r}]", remedy="Pass a mapping of names to numbers."
            ) from error
    return found


def best_of(entries: list[Entry], metric: str, mode: str) -> Entry | None:
    """The complete entry with the lowest (`min`) or highest value; the newer of equals; NaN never wins."""
    rated = [entry for entry in entries if entry.problem is None and not math.isnan(entry.metrics.get(metric, math.nan))]
    sign = 1 if mode == "min" else -1
    return min(rated, key=lambda entry: (sign * entry.metrics[metric], -entry.step), default=None)


def _records(folder: Path, names: list[str]) -> dict[str, FileRecord]:
    return {name: FileRecord(os.path.getsize(folder / name), file_hash(folder / name)) for name in names}


def _word_sums(path: Path) -> str:
    """The checksum of version 1: SHA-256 over the sums of the words of each sector. Does not detect swapped words within a sector."""
    data, sector = np.frombuffer(FileBuffer(path, kept=False).data, dtype=np.uint8), 4096
    whole = len(data) // sector * sector
    digest = hashlib.sha256(str(len(data)).encode())
    if whole:
        digest.update(data[:whole].view(np.uint64).reshape(-1, sector // 8).sum(axis=1, dtype=np.uint64).tobytes())
    digest.update(data[whole:].tobytes())
    return digest.hexdigest()[:32]


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
