"""FlatBuffers, the little that checkpoints need: a reader that checks every offset before it follows it, and a forward-only builder.

The Python `flatbuffers` package has no verifier: a bad offset makes it raise `struct.error`, read garbage or loop. Here every table,
vtable, vector and string is checked against the buffer, and no two of them may overlap (strings may be shared), which also bounds the
work and the memory by the file's size.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from ...errors import CorruptFileError
from ...storage.files import ALIGNMENT, padding

_U32, _I32, _I64, _F32 = (struct.Struct(f"<{code}") for code in "Iiqf")

_SHARED_TEXT = 16 << 20
"""Strings may be shared, so their text can be more than the file's size; beyond this much the file's size sets the limit."""


_TOO_MUCH = "the parts of the file add up to more than the file (they overlap)"


class Reader:
    """Verified access to one buffer."""

    def __init__(self, data: Any, path: str) -> None:
        self.data = data
        self.size = len(data)
        self.path = path
        self.vtables: dict[int, tuple[tuple[int, ...], int]] = {}
        self._strings: dict[int, bytes] = {}
        self.extents: list[tuple[int, int, Table | None, str]] = []
        self.claimed = 0  # bytes in use: data that does not overlap can't exceed the file size
        self._text = 0  # bytes of strings returned, shared ones each time

    def root(self, identifier: bytes) -> Table:
        if self.size < 8 or bytes(self.data[4:8]) != identifier:
            raise CorruptFileError(f"does not start with {identifier.decode()}, the mark of the format", path=self.path)
        return Table(self, _U32.unpack_from(self.data, 0)[0], None, "root")

    def finish(self) -> None:
        """Call after visiting everything: raises for overlapping tables and vectors."""
        self.extents.sort(key=itemgetter(0))
        end = 8
        for start, stop, parent, label in self.extents:
            if start < end:
                raise self.error(parent, label, "overlaps another part of the file")
            end = stop

    def close(self) -> None:
        """Drop what was visited. Tables and reader reference each other, and the mapped file, until the garbage collector runs."""
        self.extents.clear()

    def error(self, parent: Table | None, label: str, what: str) -> CorruptFileError:
        return CorruptFileError(
            what,
            path=self.path,
            field=f"{parent.where}.{label}" if parent is not None else label,
            remedy="The file is damaged or was not written by ONNX Runtime; restore it from a copy.",
        )

    def vtable(self, position: int, table: Table) -> tuple[tuple[int, ...], int]:
        """Read a vtable that is not in `vtables` yet: checked once, however many tables share it."""
        if position < 0 or position % 2 or position + 4 > self.size:
            raise self.error(table.parent, table.label, "vtable outside the file")
        size, inline = struct.unpack_from("<HH", self.data, position)
        if size < 4 or size % 2 or position + size > self.size:
            raise self.error(table.parent, table.label, f"vtable of impossible size {size}")
        fields = struct.unpack_from(f"<{(size - 4) // 2}H", self.data, position + 4)
        if inline < 4:
            raise self.error(table.parent, table.label, f"table of impossible size {inline}")
        if max(fields, default=0) >= inline:
            raise self.error(table.parent, table.label, "a field lies outside its table")
        self.vtables[position] = (fields, inline)
        return fields, inline

    def string(self, position: int, parent: Table, label: str) -> bytes:
        found = self._strings.get(position)
        if found is None:
            start, count = self.vector(position, 1, parent, label, extra=1)
            if self.data[start + count]:
                raise self.error(parent, label, "string without its terminator")
            found = self._strings[position] = bytes(self.data[start : start + count])
        self._text += len(found)
        if self._text > max(_SHARED_TEXT, 4 * self.size):
            raise self.error(parent, label, "a shared string is used so often that the text outgrows the file")
        return found

    def vector(self, position: int, itemsize: int, parent: Table, label: str, extra: int = 0) -> tuple[int, int]:
        """(position of the first element, count) of the vector at `position`, inside the buffer."""
        if position % 4 or position + 4 > self.size:
            raise self.error(parent, label, "points outside the file")
        count = _U32.unpack_from(self.data, position)[0]
        start = position + 4
        stop = start + count * itemsize + extra
        if stop > self.size:
            raise self.error(parent, label, f"says {count} elements of {itemsize} bytes, more than the file holds")
        if itemsize == 8 and start % 8 and count:
            raise self.error(parent, label, "misaligned")
        self.extents.append((position, stop, parent, label))
        self.claimed += stop - position
        if self.claimed > self.size:
            raise self.error(parent, label, _TOO_MUCH)
        return start, count


class Table:
    """One table; fields are read by number and checked when read."""

    __slots__ = ("_fields", "label", "parent", "position", "reader")

    def __init__(self, reader: Reader, position: int, parent: Table | None, label: str) -> None:
        self.reader, self.position, self.parent, self.label = reader, position, parent, label
        if position % 4 or position + 4 > reader.size:
            raise reader.error(parent, label, "points outside the file")
        vtable = position - _I32.unpack_from(reader.data, position)[0]
        self._fields, inline = reader.vtables.get(vtable) or reader.vtable(vtable, self)
        if position + inline > reader.size:
            raise reader.error(parent, label, f"table of impossible size {inline}")
        reader.extents.append((position, position + inline, parent, label))
        reader.claimed += inline
        if reader.claimed > reader.size:
            raise reader.error(parent, label, _TOO_MUCH)

    @property
    def where(self) -> str:
        return f"{self.parent.where}.{self.label}" if self.parent is not None and self.parent.label != "root" else self.label

    def _slot(self, number: int, size: int, label: str) -> int:
        """Position of a field's value; 0 when absent."""
        fields = self._fields
        offset = fields[number] if number < len(fields) else 0
        if not offset:
            return 0
        position = self.position + offset
        if offset < 4 or position % size or position + size > self.reader.size:
            raise self.reader.error(self, label, "field outside the file or misaligned")
        return position

    def int32(self, number: int, label: str, default: int = 0) -> int:
        slot = self._slot(number, 4, label)
        return _I32.unpack_from(self.reader.data, slot)[0] if slot else default

    def int64(self, number: int, label: str, default: int = 0) -> int:
        slot = self._slot(number, 8, label)
        return _I64.unpack_from(self.reader.data, slot)[0] if slot else default

    def float32(self, number: int, label: str, default: float = 0.0) -> float:
        slot = self._slot(number, 4, label)
        return _F32.unpack_from(self.reader.data, slot)[0] if slot else default

    def boolean(self, number: int, label: str) -> bool:
        slot = self._slot(number, 1, label)
        return bool(slot and self.reader.data[slot])

    def _target(self, number: int, label: str) -> int:
        slot = self._slot(number, 4, label)
        if not slot:
            return 0
        offset: int = _U32.unpack_from(self.reader.data, slot)[0]
        if not offset:
            raise self.reader.error(self, label, "points at itself")
        return slot + offset

    def string(self, number: int, label: str) -> bytes | None:
        target = self._target(number, label)
        return self.reader.string(target, self, label) if target else None

    def text(self, number: int, label: str) -> str:
        """A name: must be there and be UTF-8."""
        raw = self.string(number, label)
        if raw is None:
            raise self.reader.error(self, label, "missing")
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.reader.error(self, label, "not valid UTF-8") from error

    def table(self, number: int, label: str) -> Table | None:
        target = self._target(number, label)
        return Table(self.reader, target, self, label) if target else None

    def vector(self, number: int, itemsize: int, label: str) -> tuple[int, int] | None:
        target = self._target(number, label)
        return self.reader.vector(target, itemsize, self, label) if target else None

    def int64s(self, number: int, label: str) -> tuple[int, ...]:
        found = self.vector(number, 8, label)
        return struct.unpack_from(f"<{found[1]}q", self.reader.data, found[0]) if found else ()

    def _targets(self, number: int, label: str) -> Iterator[tuple[int, str]]:
        found = self.vector(number, 4, label)
        if not found:
            return
        start, count = found
        for index, offset in enumerate(struct.unpack_from(f"<{count}I", self.reader.data, start)):
            item = f"{label}[{index}]"
            if not offset:
                raise self.reader.error(self, item, "points at itself")
            yield start + 4 * index + offset, item

    def tables(self, number: int, label: str) -> Iterator[Table]:
        for target, item in self._targets(number, label):
            yield Table(self.reader, target, self, item)

    def strings(self, number: int, label: str) -> list[bytes]:
        return [self.reader.string(target, self, item) for target, item in self._targets(number, label)]


@dataclass
class Field:
    """One field of a table to build: its number, kind (a key of `_SIZES`) and value. Give only fields that differ from their default."""

    number: int
    kind: str
    value: Any


@dataclass
class Blob:
    """Bytes that are streamed after all tables, aligned to `ALIGNMENT`; `source` is whatever the caller needs to write them."""

    size: int
    source: Any
    slot: int = 0
    position: int = 0


@dataclass
class Layout:
    """A built buffer: `head` holds every table; each blob is a byte vector at `position`, its length word just before it."""

    head: bytearray
    blobs: list[Blob] = field(default_factory=list)
    size: int = 0


_SIZES = {"int64": 8, "int32": 4, "float32": 4, "bool": 1, "string": 4, "table": 4, "tables": 4, "strings": 4, "int64s": 4, "blob": 4}


def build(root: list[Field], identifier: bytes) -> Layout:
    """Lay out a table and everything below it. Offsets only point forward, so that blobs can come last and be streamed."""
    head = bytearray(8)
    head[4:8] = identifier
    layout = Layout(head)
    vtables: dict[bytes, int] = {}
    todo: deque[tuple[int, str, Any]] = deque([(0, "table", root)])
    while todo:
        slot, kind, value = todo.popleft()
        if kind == "blob":
            value.slot = slot
            layout.blobs.append(value)
        else:
            _U32.pack_into(head, slot, _WRITERS[kind](head, value, vtables, todo) - slot)
    end = len(head)
    for blob in layout.blobs:
        blob.position = end + 4 + padding(end + 4)
        end = blob.position + blob.size
        if end < 1 << 32:  # beyond that the caller must choose another layout; it looks at `size`
            _U32.pack_into(head, blob.slot, blob.position - 4 - blob.slot)
    layout.size = end
    return layout


def _write_table(head: bytearray, fields: list[Field], vtables: dict[bytes, int], todo: deque[tuple[int, str, Any]]) -> int:
    ordered = sorted(fields, key=lambda item: (-_SIZES[item.kind], item.number))
    offsets, inline = {}, 4
    for item in ordered:
        offsets[item.number] = inline
        inline += _SIZES[item.kind]
    count = max(offsets, default=-1) + 1
    vtable = struct.pack(f"<{count + 2}H", 4 + 2 * count, inline, *(offsets.get(number, 0) for number in range(count)))
    if vtable not in vtables:
        vtables[vtable] = len(head) + padding(len(head), 2)
        head.extend(bytes(padding(len(head), 2)) + vtable)
    head.extend(bytes(padding(len(head) + 4, 8)))  # 8-byte fields follow the 4-byte link to the vtable
    position = len(head)
    head.extend(_I32.pack(position - vtables[vtable]) + bytes(inline - 4))
    for item in ordered:
        slot = position + offsets[item.number]
        if item.kind in _SCALARS:
            _SCALARS[item.kind].pack_into(head, slot, item.value)
        else:
            todo.append((slot, item.kind, item.value))
    return position


def _write_string(head: bytearray, text: bytes, *_: Any) -> int:
    return _write_vector(head, len(text), text + b"\0")


def _write_int64s(head: bytearray, values: tuple[int, ...], *_: Any) -> int:
    head.extend(bytes(padding(len(head) + 4, 8)))
    return _write_vector(head, len(values), struct.pack(f"<{len(values)}q", *values))


def _write_vector(head: bytearray, count: int, payload: bytes) -> int:
    head.extend(bytes(padding(len(head), 4)))
    position = len(head)
    head.extend(_U32.pack(count) + payload)
    return position


def _write_offsets(kind: str) -> Callable[..., int]:
    def write(head: bytearray, values: list[Any], _: Any, todo: deque[tuple[int, str, Any]]) -> int:
        position = _write_vector(head, len(values), bytes(4 * len(values)))
        todo.extend((position + 4 + 4 * index, kind, value) for index, value in enumerate(values))
        return position

    return write


_SCALARS = {"int64": _I64, "int32": _I32, "float32": _F32, "bool": struct.Struct("<?")}
_WRITERS: dict[str, Callable[..., int]] = {
    "table": _write_table,
    "string": _write_string,
    "int64s": _write_int64s,
    "tables": _write_offsets("table"),
    "strings": _write_offsets("string"),
}

MAX_SIZE = (1 << 31) - 1
"""What ORT's verifier accepts. `ALIGNMENT` of storage.py is where blobs start."""
assert ALIGNMENT % 8 == 0
