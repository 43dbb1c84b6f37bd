"""`ort`: the flatbuffer checkpoint of ORT 1.16 to 1.19 (file identifier ODTC), versions 1 and 2, with or without a `.data` sidecar.

Read: the file is mapped, verified, and tensors alias it. Written: all tables first, then the tensor data, 64-byte aligned and streamed
from memory; ORT's own verifier and loader accept that order.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ...checkpoint.backing import backed_by
from ...checkpoint.names import joined_aliases
from ...checkpoint.state import CheckpointState, OptimizerGroup, Value, is_string, nbytes
from ...dtypes import ONNX_FROM_TORCH, STRING, TORCH_FROM_ONNX, short_name
from ...errors import CheckpointError, CorruptFileError, UnsupportedError
from ...storage.buffers import FileBuffer
from ...storage.files import Progress, padding, pending_file, string_array, write_tensor
from ...storage.filesets import Fingerprint, commit
from ...storage.locks import directory_lock
from ..savable import warn_of_nominal
from ..shapes import element_count
from ..soundness import encode_string
from . import extras, readers, sidecar
from .flatbuffer import MAX_SIZE, Blob, Field, Layout, Reader, Table, build
from .groups import prepare

SUFFIXES = (".ortckpt",)
IDENTIFIER = b"ODTC"
VERSIONS = {1: "ORT 1.16 and 1.17", 2: "ORT 1.18 and later"}
READ_BY = "ORT 1.16 and 1.17 (version 1) or 1.18 and later (version 2)"
EXTERNAL_THRESHOLD = 1800 << 20
"""Above this many bytes of tensors data goes to the sidecar, as in ORT."""

_ATTEMPTS = 50
_DTYPES = {number: dtype for number, dtype in TORCH_FROM_ONNX.items() if not dtype.is_complex}


def matches(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(8)[4:] == IDENTIFIER
    except OSError:
        return False


def read(path: Path, *, mmap: bool = True) -> CheckpointState:
    """Read a checkpoint file and, if it refers to one, its sidecar."""
    return extras.unpack(_as_written(path, mmap), path)


def read_by(path: Path) -> str:
    """The releases of ORT that read this file, and why not others."""
    state = _as_written(path, mmap=True)
    return readers.read_by(state, VERSIONS[state.format_version or 2], readers.REFUSED_BY_ORT)


def _as_written(path: Path, mmap: bool) -> CheckpointState:
    """With aliases among the weights and groups as ORT sees them."""
    for _ in range(_ATTEMPTS):
        buffer = FileBuffer(path, mmap=mmap)
        with contextlib.closing(Reader(buffer.data, os.fspath(path))) as reader:
            try:
                return _read(path, _Source(path, buffer, reader, mmap))
            except CheckpointError:
                if not buffer.replaced():  # else a writer replaced the data in between: try the new one
                    raise
    raise CheckpointError("replaced again and again while being read", path=path)


def _read(path: Path, source: _Source) -> CheckpointState:
    root = source.reader.root(IDENTIFIER)
    version = root.int32(0, "version")
    if version not in VERSIONS:
        raise UnsupportedError(
            f"version {version} of the format; known are 1 and 2",
            path=path,
            field="version",
            remedy="Either the file is damaged, or a newer release wrote it: update torch-ort-ckpt.",
        )
    state = CheckpointState(format_version=version)
    module = root.table(1, "module_state")
    if module is not None:
        state.nominal = source.nominal = module.boolean(2, "is_nominal_state")
        source.external = module.boolean(3, "has_external_data")
        state.trainable = source.tensors(module, 0, "requires_grad_params")
        state.frozen = source.tensors(module, 1, "frozen_params")
        if both := state.trainable.keys() & state.frozen.keys():
            raise CorruptFileError("both trainable and frozen", path=path, field=min(both))
    source.nominal = False  # only parameters can be nominal
    for table in root.tables(2, "optimizer_groups"):
        name = _unique(table, 0, "group_name", state.optimizer)
        group = OptimizerGroup(table.int64(1, "step"), table.float32(2, "initial_learning_rate"))
        for entry in table.tables(3, "optimizer_states"):
            group.states[_unique(entry, 0, "param_name", group.states)] = source.tensors(entry, 1, "momentums")
        state.optimizer[name] = group
    if (bag := root.table(3, "property_bag")) is not None:
        _read_properties(bag, state.properties)
    source.reader.finish()
    source.check_overlap()
    backed_by(state, source.buffers)
    return state


def repair(path: Path) -> bool:
    """Complete a save with external data that was interrupted between its renames."""
    return sidecar.repair(path)


class _Source:
    """Where tensor bytes come from while reading: the file itself or its sidecar, opened when first needed."""

    def __init__(self, path: Path, buffer: FileBuffer, reader: Reader, mmap: bool) -> None:
        self.path, self.buffer, self.reader, self.mmap = path, buffer, reader, mmap
        self.nominal = self.external = False
        self.buffers = [buffer]
        self._extents: list[tuple[int, int, str]] = []
        self._claimed = 0

    def outside(self) -> FileBuffer:
        if len(self.buffers) == 1:
            self.buffers.append(sidecar.find(self.path, self.buffer, self.mmap))
        return self.buffers[1]

    def tensors(self, parent: Table, number: int, label: str) -> dict[str, Value]:
        result: dict[str, Value] = {}
        for table in parent.tables(number, label):
            name = _unique(table, 0, "name", result)
            result[name] = self.tensor(table, name)
        return result

    def tensor(self, table: Table, name: str) -> Value:
        number = table.int32(3, "data_type")
        dims = table.int64s(2, "dims")
        if number == STRING:
            return self._strings(table, dims)
        dtype = _DTYPES.get(number)
        if dtype is None:
            raise UnsupportedError(
                f"element type {number}, which PyTorch or ORT does not have", path=self.path, field=f"{table.where} ({name})"
            )
        if self.nominal:
            return torch.empty((), dtype=dtype, device="meta")
        count = _count(table, dims, self.reader)
        size = count * dtype.itemsize
        offset = table.int64(6, "external_data_offset", -1)
        raw = table.vector(4, 1, "raw_data")
        if offset < -1:
            raise self.reader.error(table, "external_data_offset", f"negative offset {offset}")
        if offset >= 0 and self.external:
            if raw is not None and raw[1]:
                raise self.reader.error(table, "external_data_offset", "has both inline and external data")
            start, buffer = offset, self.outside()
            if offset + size > buffer.size:
                raise CorruptFileError(
                    f"needs bytes {offset} to {offset + size}, the file ends at {buffer.size}",
                    path=buffer.path,
                    field=f"{table.where} ({name})",
                    remedy="The sidecar is cut short or belongs to another checkpoint.",
                )
            self._claim(offset, size, name)
        else:
            if offset >= 0:
                raise self.reader.error(table, "external_data_offset", "external data in a checkpoint that says it has none")
            start, length = raw if raw is not None else (0, 0)
            if length != size:
                raise self.reader.error(table, "raw_data", f"holds {length} bytes, its shape and type need {size}")
            buffer = self.buffer
        try:
            return buffer.tensor(start, dtype, dims, count)
        except (RuntimeError, OverflowError, TypeError) as error:
            raise self.reader.error(table, "dims", f"impossible shape ({str(error).splitlines()[0]})") from error

    def _strings(self, table: Table, dims: tuple[int, ...]) -> Value:
        if self.nominal:
            return string_array([""], ())
        count = _count(table, dims, self.reader)
        found = [text.decode("utf-8", "surrogateescape") for text in table.strings(5, "string_data")]
        if len(found) != count:
            raise self.reader.error(table, "string_data", f"holds {len(found)} strings, its shape needs {count}")
        try:
            return string_array(found, dims)
        except (ValueError, OverflowError) as error:
            raise self.reader.error(table, "dims", f"impossible shape ({error})") from error

    def _claim(self, offset: int, size: int, name: str) -> None:
        """Count external bytes in use: data that does not overlap can't exceed the size of the sidecar, which also bounds copies."""
        if not size:
            return
        self._extents.append((offset, offset + size, name))
        self._claimed += size
        if self._claimed > self.outside().size:
            self.check_overlap()

    def check_overlap(self) -> None:
        end, before = 0, ""
        for start, stop, name in sorted(self._extents):
            if start < end:
                raise CorruptFileError(f"overlaps the data of {before!r}", path=self.outside().path, field=name)
            end, before = stop, name


def _count(table: Table, dims: tuple[int, ...], reader: Reader) -> int:
    try:
        return element_count(dims)
    except ValueError as error:
        raise reader.error(table, "dims", str(error)) from error


def _unique(table: Table, number: int, label: str, taken: Mapping[str, Any]) -> str:
    name = table.text(number, label)
    if name in taken:
        raise table.reader.error(table, label, f"{name!r} occurs twice")
    return name


def _read_properties(bag: Table, properties: dict[str, int | float | str]) -> None:
    for table in bag.tables(0, "ints"):
        properties[_unique(table, 0, "name", properties)] = table.int64(1, "value")
    for table in bag.tables(1, "floats"):
        properties[_unique(table, 0, "name", properties)] = table.float32(1, "value")
    for table in bag.tables(2, "strings"):
        text = table.string(1, "value") or b""
        properties[_unique(table, 0, "name", properties)] = text.decode("utf-8", "surrogateescape")


# Writing


def write(
    state: CheckpointState,
    path: Path,
    *,
    durable: bool = True,
    progress: Progress | None = None,
    version: int = 2,
    external_data: bool | None = None,
    groups: str = "single",
) -> None:
    """Write a checkpoint that ORT's own loader reads.

    `version=1` is for devices on ORT 1.16 / 1.17. `external_data` puts tensor data into `<path>.data`; None decides by size as ORT does.
    ORT trains with one group, `group0`: `groups` says what to do with several: refuse ("single"), fold them into one ("merge"), or
    write them as they are ("keep": we read them back, ORT loads the file but can't train from it).
    """
    _check(state, path, version)
    state, notes = prepare(state, path, groups)
    total = sum(nbytes(value) for _, value in state.tensors() if not is_string(value))
    external = total > EXTERNAL_THRESHOLD and version >= 2 and not state.nominal if external_data is None else external_data
    if external and version == 1:
        raise UnsupportedError("version 1 has no external data", path=path, remedy="Write version 2, or pass external_data=False.")
    if external and state.nominal:
        raise UnsupportedError("a nominal checkpoint has no data to put elsewhere", path=path)
    warn_of_nominal(state, path)
    plan = _Plan(state, path, version, external, notes)
    layout = build(plan.root(), IDENTIFIER)
    if layout.size > MAX_SIZE:
        raise UnsupportedError(
            f"{layout.size} bytes in one file, more than the 2 GiB ORT can read",
            path=path,
            remedy="Pass external_data=True" + (" and version=2." if version == 1 else "."),
        )
    if external:
        _write_pair(path, layout, plan, durable, progress)
    else:
        _write_single(path, layout, durable, progress)


def _write_single(path: Path, layout: Layout, durable: bool, progress: Progress | None) -> None:
    with pending_file(path) as pending:
        _write_layout(pending.file, layout, progress)
        pending.finish(durable)
        with directory_lock(pending.target.parent):
            replaced_pair = _has_external_data(path)
            pending.commit(durable)
            sidecar.remove(pending.target, replaced_pair=replaced_pair)


def _write_pair(path: Path, layout: Layout, plan: _Plan, durable: bool, progress: Progress | None) -> None:
    fingerprint = Fingerprint(layout.head)
    with pending_file(sidecar.path_of(os.path.realpath(path))) as data, pending_file(path) as main:
        position = 0
        for tensor, offset in plan.outside:
            data.file.write(bytes(offset - position))
            position = offset + write_tensor(data.file, tensor, progress)
            fingerprint.update(tensor)
        identity = fingerprint.identity()
        data.file.write(sidecar.seal(identity))
        _write_layout(main.file, layout, None)
        main.file.write(bytes(padding(layout.size)) + sidecar.seal(identity))
        commit(main, [data], identity, durable, sidecar.identity_at)


def _write_layout(file: BinaryIO, layout: Layout, progress: Progress | None) -> None:
    file.write(layout.head)
    position = len(layout.head)
    for blob in layout.blobs:
        file.write(bytes(blob.position - 4 - position) + struct.pack("<I", blob.size))
        position = blob.position + write_tensor(file, blob.source, progress)


class _Plan:
    """Turns a state into tables, deciding for each tensor where its bytes go."""

    def __init__(self, state: CheckpointState, path: Path, version: int, external: bool, notes: dict[str, dict[str, Any]]) -> None:
        self.state, self.path, self.version, self.external, self.notes = state, path, version, external, notes
        self.outside: list[tuple[torch.Tensor, int]] = []
        self._end = 0

    def root(self) -> list[Field]:
        state = self.state
        fields = [Field(0, "int32", self.version)]
        frozen = {**state.frozen, **joined_aliases(state)}
        if state.trainable or frozen or state.nominal or self.external:
            module = [
                Field(0, "tables", self.tensors(state.trainable, "trainable", state.nominal)),
                Field(1, "tables", self.tensors(frozen, "frozen", state.nominal)),
            ]
            module += [Field(2, "bool", True)] if state.nominal else []
            module += [Field(3, "bool", True)] if self.external else []
            fields.append(Field(1, "table", module))
        fields.append(Field(2, "tables", [self.group(name, group) for name, group in sorted(state.optimizer.items())]))
        if properties := extras.pack(state, self.path, self.notes):
            fields.append(Field(3, "table", self.bag(properties)))
        return fields

    def group(self, name: str, group: OptimizerGroup) -> list[Field]:
        states = [
            [Field(0, "string", self.text(param)), Field(1, "tables", self.tensors(moments, f"{name}/{param}"))]
            for param, moments in sorted(group.states.items())
        ]
        fields = [Field(0, "string", self.text(name)), Field(3, "tables", states)]
        fields += [Field(1, "int64", group.step)] if group.step else []
        return [*fields, *_float_field(2, group.initial_lr)]

    def bag(self, properties: dict[str, int | float | str]) -> list[Field]:
        kinds: dict[type, list[list[Field]]] = {int: [], float: [], str: []}
        for name, value in sorted(properties.items()):
            entry = [Field(0, "string", self.text(name))]
            if isinstance(value, str):
                entry.append(Field(1, "string", encode_string(value, self.path, f"properties/{name}")))
            elif isinstance(value, float):
                entry += _float_field(1, value)
            elif value:
                entry.append(Field(1, "int64", value))
            kinds[type(value)].append(entry)
        return [Field(number, "tables", entries) for number, entries in enumerate(kinds.values()) if entries]

    def tensors(self, values: Mapping[str, Value], where: str, nominal: bool = False) -> list[list[Field]]:
        return [self.tensor(name, value, where, nominal) for name, value in sorted(values.items())]

    def tensor(self, name: str, value: Value, where: str, nominal: bool) -> list[Field]:
        fields = [Field(0, "string", self.text(name))]
        if is_string(value):
            fields.append(Field(3, "int32", STRING))
            texts = [] if nominal else [encode_string(text, self.path, f"{where}/{name}") for text in value.reshape(-1).tolist()]
            return [*fields, Field(2, "int64s", () if nominal else value.shape), Field(5, "strings", texts)]
        number = ONNX_FROM_TORCH.get(value.dtype)
        if number not in _DTYPES:
            raise UnsupportedError(
                f"ORT has no element type {short_name(value.dtype)}", path=self.path, field=f"{where}/{name}", remedy="Convert it first."
            )
        fields.append(Field(3, "int32", number))
        if nominal:  # ORT requires the vector of bytes, even if empty
            return [*fields, Field(2, "int64s", ()), Field(4, "blob", Blob(0, torch.empty(0, dtype=value.dtype)))]
        fields.append(Field(2, "int64s", tuple(value.shape)))
        if value.is_meta:
            raise UnsupportedError(
                "has no data (a meta tensor)",
                path=self.path,
                field=f"{where}/{name}",
                remedy="Complete the nominal state first, or set state.nominal.",
            )
        if not self.external:
            return [*fields, Field(4, "blob", Blob(nbytes(value), value))]
        offset = self._end + padding(self._end)
        self.outside.append((value, offset))
        self._end = offset + nbytes(value)
        return [*fields, Field(6, "int64", offset)]

    def text(self, name: str) -> bytes:
        try:
            return name.encode()
        except (UnicodeEncodeError, AttributeError) as error:
            raise UnsupportedError("a name that is not Unicode text", path=self.path, field=repr(name)) from error


def _float_field(number: int, value: float) -> list[Field]:
    value = extras.to_float32(value)
    return [] if struct.pack("<f", value) == bytes(4) else [Field(number, "float32", value)]


def _check(state: CheckpointState, path: Path, version: int) -> None:
    if version not in VERSIONS:
        raise UnsupportedError(f"no version {version} of this format", path=path, remedy="Use 1 (ORT 1.16, 1.17) or 2.")
    if version == 1 and state.nominal:
        raise UnsupportedError("version 1 has no nominal checkpoints", path=path, remedy="Complete the state, or write version 2.")
    if both := state.trainable.keys() & state.frozen.keys():
        raise UnsupportedError("both trainable and frozen", path=path, field=min(both))


def _has_external_data(path: Path) -> bool:
    """Whether `path` now holds a checkpoint whose data is in its sidecar. Anything unreadable is left alone."""
    with contextlib.suppress(CheckpointError):
        reader = Reader(FileBuffer(path, kept=False).data, os.fspath(path))
        with contextlib.closing(reader):
            module = reader.root(IDENTIFIER).table(1, "module_state")
            return module is not None and module.boolean(3, "has_external_data")
    return False
