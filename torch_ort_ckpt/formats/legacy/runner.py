"""`runner`: the folder that the C++ TrainingRunner wrote (ORT 1.3 to 1.19 sources).

`tensors.pbseq` describes tensors stored end to end in `tensors.bin`; weights, their `_fp16` aliases and optimizer state are
side by side (`Moment_1_<w>`, `Update_Count_<w>`, Lamb's `Step`). `properties.pbseq` holds strings.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...checkpoint import properties as names
from ...checkpoint.backing import backed_by
from ...checkpoint.names import joined_aliases, split_aliases
from ...checkpoint.state import CheckpointState, Value, is_string, nbytes
from ...errors import CheckpointError, CorruptFileError, MissingFileError, UnsupportedError
from ...storage.buffers import FileBuffer
from ...storage.files import Progress, write_tensor
from ...storage.folders import atomic_folder
from ...storage.folders import repair as repair
from ..onnx import protobuf
from . import moments

SUFFIXES = (".runner",)
READ_BY = "the C++ TrainingRunner of ORT 1.3 to 1.19 (in no released package)"

_TENSORS, _DATA, _PROPERTIES = "tensors.pbseq", "tensors.bin", "properties.pbseq"
_INTEGERS = (names.STEP, names.ROUND, names.WEIGHT_UPDATE_STEP, names.TRAINING_DATA_SET_INDEX, *names.RANK)
_PREFIXES = tuple(f"{name}_" for name in (*moments.OURS, moments.UPDATE_COUNT))


def matches(path: Path) -> bool:
    return (path / _TENSORS).is_file()


def read(path: Path, *, mmap: bool = True) -> CheckpointState:
    """Read the three files of a folder."""
    source = _Data(path, mmap)
    buffer = FileBuffer(path / _TENSORS, mmap=mmap)
    tensors: dict[str, Value] = {}
    for message in protobuf.sequence(buffer):
        name, value = protobuf.tensor(message, source.find)
        if name in tensors:
            raise message.error(f"{name!r} occurs twice")
        tensors[name] = value
    source.check_overlap()
    texts: dict[str, str] = {}
    place = path / _PROPERTIES
    if place.exists():
        for message in protobuf.sequence(FileBuffer(place, mmap=mmap)):
            key, text = protobuf.string_entry(message)
            if key in texts:
                raise message.error(f"{key!r} occurs twice")
            texts[key] = text
    note = texts.pop(moments.NOTE, None)
    state = moments.restore(from_flat(tensors, {key: _parsed(key, text) for key, text in texts.items()}, path), note, path)
    backed_by(state, [buffer, *source.buffers.values()])
    return state


def write(state: CheckpointState, path: Path, *, durable: bool = True, progress: Progress | None = None) -> None:
    """Write a folder as TrainingRunner lays it out."""
    moments.check_plain(state, path)
    tensors = to_flat(state, path)
    properties = {key: str(value) for key, value in state.properties.items() if key != names.OPTIMIZER_NAME}
    if moments.NOTE in properties:
        raise UnsupportedError("this name is taken", path=path, field=f"properties/{moments.NOTE}")
    inferred = from_flat(dict(tensors), {key: _parsed(key, text) for key, text in properties.items()}, path)
    if (note := moments.note(inferred, state, path)) is not None:
        properties[moments.NOTE] = note
    with atomic_folder(path, _owns, durable=durable) as folder:
        described, offset, data = [], 0, folder.open(_DATA)
        for name, value in sorted(tensors.items(), key=lambda item: item[0].encode("utf-8", "surrogatepass")):
            if is_string(value) or value.dtype.is_complex:
                raise UnsupportedError("this format has neither string nor complex tensors", path=path, field=name)
            described.append(protobuf.encode_external(name, value, _DATA, offset, path))
            write_tensor(data, value, progress)
            offset += nbytes(value)
        protobuf.write_sequence(folder.open(_TENSORS), list(described))
        entries = sorted((protobuf.encode_text(key, path), protobuf.encode_entry(key, text, path)) for key, text in properties.items())
        protobuf.write_sequence(folder.open(_PROPERTIES), [(entry, None) for _, entry in entries])


def from_flat(tensors: dict[str, Value], properties: dict[str, Any], path: Path) -> CheckpointState:
    """A state from weights and optimizer state under flat names (`Moment_1_<w>`)."""
    shared = tensors.pop(moments.SHARED_STEP, None)
    states: moments.States = {}
    for name in list(tensors):
        if name.startswith(_PREFIXES):
            prefix = next(prefix for prefix in _PREFIXES if name.startswith(prefix))
            states.setdefault(name[len(prefix) :], {})[prefix[:-1]] = tensors.pop(name)
    state = CheckpointState(trainable=tensors, properties=dict(properties))
    if states or shared is not None:
        state.optimizer[moments.GROUP] = moments.to_group(states, shared, properties, path)
        state.properties.setdefault(names.OPTIMIZER_NAME, names.ADAM if shared is None else names.LAMB)
    split_aliases(state)
    if states:  # what the optimizer does not know is frozen
        known = {name: value for name, value in state.trainable.items() if name in states}
        state.frozen = {name: value for name, value in state.trainable.items() if name not in states}
        state.trainable = known
    return state


def to_flat(state: CheckpointState, path: Path) -> dict[str, Value]:
    """Weights, aliases and optimizer state under flat names."""
    tensors: dict[str, Value] = {**state.parameters, **joined_aliases(state)}
    for name in tensors:
        if name == moments.SHARED_STEP or name.startswith(_PREFIXES):
            raise UnsupportedError("a weight whose name would be read back as optimizer state", path=path, field=name, remedy="Rename it.")
    group = moments.only_group(state, path)
    if group is None:
        return tensors
    states, shared = moments.from_group(group, state.properties.get(names.OPTIMIZER_NAME) == names.LAMB, path)
    if shared is not None:
        tensors[moments.SHARED_STEP] = shared
    for param, values in states.items():
        for moment, value in values.items():
            if moment not in moments.OURS and moment != moments.UPDATE_COUNT:
                raise UnsupportedError(f"this format can't hold a moment called {moment!r}", path=path, field=f"optimizer/{param}")
            tensors[f"{moment}_{param}"] = value
    return tensors


class _Data:
    """The file of tensor bytes, opened when first needed; no two tensors may claim the same bytes."""

    def __init__(self, path: Path, mmap: bool) -> None:
        self.path, self.mmap = path, mmap
        self.buffers: dict[str, FileBuffer] = {}
        self._extents: list[tuple[str, int, int, str]] = []
        self._claimed = 0

    def find(self, entries: dict[str, str], size: int, name: str) -> tuple[FileBuffer, int]:
        buffer = self._open(entries.get("location", ""), name)
        offset, length = (
            protobuf.external_number(entries.get(key), key, default, self.path / _TENSORS, name)
            for key, default in (("offset", 0), ("length", size))
        )
        if length != size:
            raise CorruptFileError(f"holds {length} bytes, its shape and type need {size}", path=buffer.path, field=name)
        if offset + size > buffer.size:
            raise CorruptFileError(
                f"needs bytes {offset} to {offset + size}, the file ends at {buffer.size}",
                path=buffer.path,
                field=name,
                remedy="It is cut short or belongs to another checkpoint.",
            )
        if size:
            self._extents.append((buffer.path, offset, offset + size, name))
            self._claimed += size
            if self._claimed > sum(opened.size for opened in self.buffers.values()):
                self.check_overlap()
        return buffer, offset

    def check_overlap(self) -> None:
        before: tuple[str, int, int, str] = ("", 0, 0, "")
        for extent in sorted(self._extents):
            if extent[0] == before[0] and extent[1] < before[2]:
                raise CorruptFileError(f"overlaps the data of {before[3]!r}", path=extent[0], field=extent[3])
            before = extent

    def _open(self, location: str, name: str) -> FileBuffer:
        if location in self.buffers:
            return self.buffers[location]
        place = self.path / location
        if location in ("", ".", "..") or Path(location).name != location or "\\" in location or "\0" in location or ":" in location:
            raise CheckpointError(
                f"refers to {location!r}, outside the checkpoint's folder",
                path=self.path,
                field=name,
                remedy="Keep tensors.bin in the folder.",
            )
        if place.is_symlink() and os.path.dirname(os.path.realpath(place)) != os.path.realpath(self.path):
            raise CheckpointError("a symbolic link to another folder", path=place, remedy="Put the file itself into the checkpoint.")
        if not place.exists():
            raise MissingFileError("the tensor data of this checkpoint is missing", path=place)
        self.buffers[location] = FileBuffer(place, mmap=self.mmap)
        return self.buffers[location]


def _parsed(key: str, text: str) -> int | str:
    """Counters as numbers where the text is exactly how a number is written."""
    if key in _INTEGERS and len(text) < 20 and text.isascii() and text.removeprefix("-").isdigit() and str(int(text)) == text:
        return int(text)
    return text


def _owns(name: str) -> bool:
    return name in (_TENSORS, _DATA, _PROPERTIES)
