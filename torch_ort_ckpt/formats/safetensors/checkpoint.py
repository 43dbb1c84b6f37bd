"""`safetensors`: weights in a file any loader can read unchanged, optimizer state in a file of its own.

    folder/model.safetensors            or  name.safetensors
    folder/optimizer.safetensors            name.optimizer.safetensors     (or in the same file: see `single.py`)

Above `max_shard_size` weights become `model-00001-of-00003.safetensors` ... with `model.safetensors.index.json`, likewise the optimizer.
What safetensors can't hold (trainability, groups, properties, aliases, partitions, string tensors) is one JSON text under the key
`torch_ort_ckpt` of the string metadata. Tied weights follow the convention of `safetensors.torch.save_model`: metadata `{dropped: kept}`.
The files of one save share an identity (see `fileset`), so that an interrupted save is detected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.backing import backed_by
from ...checkpoint.names import split_aliases
from ...checkpoint.state import CheckpointState, nbytes
from ...errors import CheckpointError, CorruptFileError, UnsupportedError
from ...storage.buffers import FileBuffer
from ...storage.files import PendingFile, Progress, pending_file, save_error
from ...storage.filesets import Fingerprint, commit, locate
from ...storage.filesets import repair as repair_part
from ...storage.locks import directory_lock
from ...storage.tensors import memory_key
from ..notes import describe, rebuild
from ..ort import extras
from ..shapes import MAX_TIES
from .file import IDENTITY_KEY, identity_of, parse_json, read_file, read_header, reported, write_file, write_identity
from .single import INLINE, apply_texts, drop_empty_sums, join_moments, take_moments, texts_of

SUFFIXES = (".safetensors", ".safetensors.index.json")
KEY = "torch_ort_ckpt"
MAX_SHARD_SIZE = 5 * 10**9
_ATTEMPTS = 50
_SHARD = re.compile(r"(.*)-\d{5}-of-\d{5}\.safetensors", re.DOTALL | re.IGNORECASE)


def matches(path: Path) -> bool:
    if path.is_dir():
        return any(os.path.exists(path / f"model{suffix}") for suffix in SUFFIXES)
    return path.name.lower().endswith(SUFFIXES)


def is_part(path: Path) -> bool:
    """Whether this file is a shard, or the optimizer's, of a checkpoint next to it."""
    shard = _SHARD.fullmatch(path.name)
    if shard is not None:
        return os.path.exists(path.with_name(shard[1] + SUFFIXES[1])) or is_part(path.with_name(shard[1] + SUFFIXES[0]))
    stem = next((path.name.removesuffix(f".optimizer{suffix}") for suffix in SUFFIXES if path.name.endswith(f".optimizer{suffix}")), None)
    return stem is not None and any(os.path.exists(path.with_name(f"{stem}{suffix}")) for suffix in SUFFIXES)


def read(path: Path, *, mmap: bool = True) -> CheckpointState:
    """Read weights and, where our metadata says there is one, the optimizer file."""
    places = _Places.of(path)
    for _ in range(_ATTEMPTS):
        before = places.marks()
        try:
            return _read(path, places, mmap)
        except CheckpointError:
            if places.marks() == before:  # else a writer replaced the files in between: try the new ones
                raise
    raise CheckpointError("replaced again and again while being read", path=path)


def _read(path: Path, places: _Places, mmap: bool) -> CheckpointState:
    single, index = (os.path.exists(f"{places.model}{suffix}") for suffix in places.suffixes)
    model = _Bundle.open(places, places.model, index and not single, mmap)
    with reported(model.path):
        note = model.note
        if not note:
            return _foreign(model)
        kind = note["moments"]
        inline = take_moments(model.tensors, note) if kind == INLINE else {}
        if kind == INLINE:
            drop_empty_sums(model.tensors, note)
        state = rebuild(model.tensors, note, path)
        backed_by(state, model.buffers)
        for (group, param, moment), value in inline.items():
            state.optimizer[group].states[param][moment] = value
        if kind == INLINE:
            apply_texts(state, model.metadata, path)
    if kind and kind != INLINE:
        moments = _Bundle.open(places, places.optimizer, kind == "sharded", mmap, model)
        _read_moments(state, moments)
        backed_by(state, [*model.buffers, *moments.buffers])
    return state


def _foreign(model: _Bundle) -> CheckpointState:
    """A file written by other software: floating-point tensors count as trainable."""
    state = backed_by(CheckpointState(), model.buffers)
    for name, value in model.tensors.items():
        (state.trainable if value.is_floating_point() else state.frozen)[name] = value
    return split_aliases(state)


def repair(path: Path) -> bool:
    """Give every part its final name after an interrupted save; returns whether there was one."""
    places = _Places.of(path)
    folder = places.model.parent
    with directory_lock(folder):
        main = next((place for place in (Path(f"{places.model}{suffix}") for suffix in places.suffixes) if os.path.exists(place)), None)
        identity = identity_of(main) if main is not None else None
        if identity is None:
            return False
        try:
            targets = [folder / name.removesuffix(f".{identity}") for name in os.listdir(folder) if name.endswith(f".{identity}")]
        except OSError as error:
            raise CheckpointError(f"can't be listed ({error.strerror})", path=folder) from error
        moved = [repair_part(target, identity, identity_of) for target in targets]
    return any(moved)


def _read_moments(state: CheckpointState, moments: _Bundle) -> None:
    with reported(moments.path):
        for key, (group, param, moment) in moments.note["keys"].items():
            state.optimizer[group].states[param][moment] = moments.tensors[key]


@dataclasses.dataclass(frozen=True)
class _Places:
    """The two stems of a checkpoint: `<folder>/model` and `<folder>/optimizer`, or `<name>` and `<name>.optimizer`."""

    model: Path
    optimizer: Path
    suffixes: tuple[str, str] = SUFFIXES
    """Of a single file and of an index, in the case in which the user wrote them."""

    @classmethod
    def of(cls, path: Path) -> _Places:
        text = os.fspath(path)
        for suffix in reversed(SUFFIXES):
            if text.lower().endswith(suffix):
                stem, given = Path(text[: -len(suffix)]), text[-len(suffix) :]
                single = given[: len(SUFFIXES[0])]
                optimizer = stem.with_name("optimizer") if stem.name == "model" else stem.with_name(f"{stem.name}.optimizer")
                return cls(stem, optimizer, (single, given if given != single else single + SUFFIXES[1].removeprefix(SUFFIXES[0])))
        return cls(path / "model", path / "optimizer")

    def marks(self) -> list[tuple[int, int, int] | None]:
        """Change when a save commits."""
        found: list[tuple[int, int, int] | None] = []
        for suffix in self.suffixes:
            try:
                now = os.stat(f"{self.model}{suffix}")
                found.append((now.st_ino, now.st_size, now.st_mtime_ns))
            except OSError:
                found.append(None)
        return found


@dataclasses.dataclass
class _Bundle:
    """One safetensors file, or the shards of an index, read."""

    path: Path
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    buffers: list[FileBuffer] = dataclasses.field(default_factory=list)

    @classmethod
    def open(cls, places: _Places, stem: Path, sharded: bool, mmap: bool, main: _Bundle | None = None) -> _Bundle:
        """`main`: the bundle that must be from the same save."""
        path = Path(f"{stem}{places.suffixes[sharded]}")
        if main is not None:
            path = _located(main, path)
        bundle = cls(path)
        if sharded:
            with reported(path):
                bundle._read_shards(mmap)
        else:
            bundle.tensors, bundle.metadata, buffer = read_file(path, mmap)
            bundle.buffers.append(buffer)
        for dropped, kept in bundle.metadata.items():
            if kept in bundle.tensors and dropped not in bundle.tensors and dropped != "format":
                bundle.tensors[dropped] = bundle.tensors[kept]
        return bundle

    def _read_shards(self, mmap: bool) -> None:
        content = parse_json(bytes(FileBuffer(self.path, mmap=False).data))
        self.metadata = {str(key): value for key, value in content.get("metadata", {}).items() if isinstance(value, str)}
        for name in sorted(set(content["weight_map"].values())):
            if os.path.basename(name) != name or name in ("", ".", ".."):
                raise CorruptFileError("a shard outside the checkpoint's folder", path=self.path, field=f"weight_map: {name!r}")
            place = _located(self, self.path.parent / name)
            tensors, _, buffer = read_file(place, mmap)
            if both := sorted(self.tensors.keys() & tensors.keys()):
                raise CorruptFileError("in two shards", path=place, field=both[0])
            self.tensors.update(tensors)
            self.buffers.append(buffer)
        if missing := sorted(content["weight_map"].keys() - self.tensors.keys()):
            raise CorruptFileError("in the index but in no shard", path=self.path, field=missing[0])

    @property
    def note(self) -> dict[str, Any]:
        text = self.metadata.get(KEY)
        return parse_json(text.encode()) if text is not None else {}


def _located(main: _Bundle, path: Path) -> Path:
    """`path`, or where an interrupted save left it."""
    return locate(main.path, [path], main.metadata.get(IDENTITY_KEY), lambda place: (place, identity_of(place)))


def write(
    state: CheckpointState,
    path: Path,
    *,
    durable: bool = True,
    progress: Progress | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    metadata: Mapping[str, str] | None = None,
    single_file: bool = False,
    accumulators: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write weights, and optimizer state in a file next to them, or in the same one (`single_file=True`, what step models start from;
    `accumulators` are its sums of gradients and their count). `metadata` adds strings to the file's own, as
    `safetensors.torch.save_file` does."""
    if state.nominal:
        raise UnsupportedError("a nominal state has no data to write", path=path, remedy="Complete it first, or keep it in format 'ort'.")
    places = _Places.of(path)
    named, note = describe(state, path)
    weights, ties = _untie(named)
    texts = dict(metadata or {})
    if single_file:
        weights, keys = join_moments(state, weights, path)
        weights |= accumulators or {}
        note |= {"moments": INLINE, "keys": keys, "accumulators": sorted(accumulators or {})}
        note["frozen"] = [*note["frozen"], *note["accumulators"]]
        texts |= texts_of(state)
        moments, moment_shards, weight_shards = {}, [], [weights]
    else:
        keys = _moment_keys(state)
        moments = {key: state.optimizer[group].states[param][moment] for key, (group, param, moment) in keys.items()}
        moment_shards, weight_shards = _shards(moments, max_shard_size), _shards(weights, max_shard_size)
        note["moments"] = ("sharded" if len(moment_shards) > 1 else "single") if moments else ""
    texts |= {"format": "pt", **ties, KEY: extras.dump_json(note, path, KEY)}
    writer = _Writer(durable, progress, places.suffixes)
    try:
        places.model.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise save_error(error, path) from error
    with contextlib.ExitStack() as stack:
        main = writer.bundle(stack, places.model, weight_shards, texts, grouped=bool(moments))
        if moments:
            texts = {"format": "pt", KEY: extras.dump_json({"keys": keys}, path, KEY)}
            writer.others.append(writer.bundle(stack, places.optimizer, moment_shards, texts, grouped=True))
        hidden_by = Path(f"{places.model}{places.suffixes[0]}") if len(weight_shards) > 1 else None  # a single file comes first in `_read`
        writer.finish(main, hidden_by, _obsolete(places, main, writer))


def _moment_keys(state: CheckpointState) -> dict[str, tuple[str, str, str]]:
    """Readable tensor names for the optimizer file; names that contain slashes may collide and get a number."""
    keys: dict[str, tuple[str, str, str]] = {}
    for group_name, group in sorted(state.optimizer.items()):
        for param, states in sorted(group.states.items()):
            for moment in sorted(states):
                key = f"{group_name}/{param}/{moment}"
                keys[key if key not in keys else f"{key}#{len(keys)}"] = (group_name, param, moment)
    return keys


def _untie(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each memory once (or once for every `MAX_TIES` names); of tied names the first in order keeps the data."""
    kept: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    seen: dict[Any, str] = {}
    uses: Counter[str] = Counter()
    for name, value in sorted(tensors.items()):
        whole = memory_key(value) if value.numel() else name
        if uses[seen.get(whole, "")] == MAX_TIES:
            seen[whole] = name
        first = seen.setdefault(whole, name)
        uses[first] += 1
        if first == name or name in ("format", KEY):
            kept[name] = value
        else:
            ties[name] = first
    return kept, ties


def _shards(tensors: Mapping[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, value in sorted(tensors.items()):
        if shards[-1] and size + nbytes(value) > limit:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += nbytes(value)
    return shards


class _Writer:
    """Collects the temporary files of one save and commits them together."""

    def __init__(self, durable: bool, progress: Progress | None, suffixes: tuple[str, str]) -> None:
        self.durable, self.progress, self.suffixes = durable, progress, suffixes
        self.others: list[PendingFile] = []
        self.fingerprint = Fingerprint()
        self.marks: list[tuple[PendingFile, int]] = []
        self.indexes: list[tuple[PendingFile, dict[str, Any]]] = []

    def bundle(
        self, stack: contextlib.ExitStack, stem: Path, shards: list[dict[str, torch.Tensor]], texts: dict[str, str], grouped: bool
    ) -> PendingFile:
        """Write one bundle's files; returns its main file: the file itself or the index."""
        if len(shards) == 1:
            return self._file(stack, Path(f"{stem}{self.suffixes[0]}"), shards[0], texts, grouped)
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            target = stem.with_name(f"{stem.name}-{number:05d}-of-{len(shards):05d}{self.suffixes[0]}")
            self.others.append(self._file(stack, target, shard, {"format": "pt"}, True))
            weight_map.update(dict.fromkeys(shard, target.name))
        pending = stack.enter_context(pending_file(f"{stem}{self.suffixes[1]}"))
        total = sum(nbytes(value) for shard in shards for value in shard.values())
        self.indexes.append((pending, {"metadata": {"total_size": total, **texts}, "weight_map": weight_map}))
        return pending

    def _file(
        self, stack: contextlib.ExitStack, target: Path, tensors: dict[str, torch.Tensor], texts: dict[str, str], grouped: bool
    ) -> PendingFile:
        pending = stack.enter_context(pending_file(target))
        mark = write_file(pending.file, tensors, texts, target, self.progress, self.fingerprint if grouped else None)
        if grouped:
            self.marks.append((pending, mark))
        return pending

    def finish(self, main: PendingFile, hidden_by: Path | None, obsolete: list[Path]) -> None:
        for _, content in self.indexes:
            self.fingerprint.head(json.dumps(content).encode())
        identity = self.fingerprint.identity()
        for pending, mark in self.marks:
            write_identity(pending.file, mark, identity)
        for pending, content in self.indexes:
            content["metadata"][IDENTITY_KEY] = identity
            pending.file.write(json.dumps(content, indent=2).encode())
        commit(main, self.others, identity, self.durable, identity_of, hidden_by, obsolete)


def files(path: Path) -> list[Path]:
    """All files that a checkpoint of ours at `path` can consist of: both forms of its bundles, and the shards that their indexes name."""
    return _files(_Places.of(path))


def _files(places: _Places) -> list[Path]:
    found: list[Path] = []
    for stem in (places.model, places.optimizer):
        found += [Path(f"{stem}{suffix}") for suffix in places.suffixes]
        with contextlib.suppress(CheckpointError, ValueError, KeyError, AttributeError, TypeError):
            content = parse_json(bytes(FileBuffer(found[-1], mmap=False).data))
            if KEY in content["metadata"]:
                found += [stem.with_name(os.path.basename(name)) for name in sorted(set(content["weight_map"].values()))]
    return found


def _obsolete(places: _Places, main: PendingFile, writer: _Writer) -> list[Path]:
    """Files of the save being replaced that the new one does not write: the other form of a bundle, its shards, the optimizer's."""
    written = {pending.target.name for pending in (main, *writer.others)}
    either_form = {f"{places.model.name}{suffix}" for suffix in places.suffixes}  # by any writer: this path is to be overwritten
    return [
        place
        for place in _files(places)
        if place.name not in written and (place.name in either_form or not os.path.lexists(place) or _is_ours(place))
    ]


def _is_ours(path: Path) -> bool:
    try:
        if path.name.lower().endswith(SUFFIXES[1]):
            return KEY in parse_json(bytes(FileBuffer(path, mmap=False).data)).get("metadata", {})
        with reported(path):
            metadata, _ = read_header(path)
        return KEY in metadata or IDENTITY_KEY in metadata
    except (CheckpointError, ValueError, AttributeError):
        return False
