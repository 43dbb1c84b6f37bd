"""Checkpoints for the tests of `ort`, built by the official `flatbuffers` package from the same `Field` trees that our builder takes.

Lists, strings and bytearrays that occur twice (the same object) are written once and shared: what a hostile writer would do.
"""

from __future__ import annotations

import struct
from typing import Any

import flatbuffers

from torch_ort_ckpt.formats.ort.flatbuffer import Field

Fields = list[Field]


def official(root: Fields, identifier: bytes = b"ODTC") -> bytes:
    builder = flatbuffers.Builder(1024)
    builder.Finish(_table(builder, root, {}), identifier)
    return bytes(builder.Output())


def _table(builder: flatbuffers.Builder, fields: Fields, done: dict[int, int]) -> int:
    if id(fields) in done:
        return done[id(fields)]
    children = {item.number: _child(builder, item.kind, item.value, done) for item in fields if item.kind not in _SCALARS}
    builder.StartObject(max((item.number for item in fields), default=-1) + 1)
    for item in fields:
        if item.kind in _SCALARS:
            _SCALARS[item.kind](builder, item.value)
            builder.Slot(item.number)
        else:
            builder.PrependUOffsetTRelativeSlot(item.number, children[item.number], 0)
    done[id(fields)] = builder.EndObject()
    return done[id(fields)]


_SCALARS = {
    "int64": flatbuffers.Builder.PrependInt64,
    "int32": flatbuffers.Builder.PrependInt32,
    "float32": flatbuffers.Builder.PrependFloat32,
    "bool": flatbuffers.Builder.PrependBool,
}


def _child(builder: flatbuffers.Builder, kind: str, value: Any, done: dict[int, int]) -> int:
    if kind == "table":
        return _table(builder, value, done)
    if (isinstance(value, bytes) and kind == "blob") or isinstance(value, tuple):  # Python itself shares equal constants
        return _vector(builder, kind, value, done)
    if id(value) not in done:
        done[id(value)] = _vector(builder, kind, value, done)
    return done[id(value)]


def _vector(builder: flatbuffers.Builder, kind: str, value: Any, done: dict[int, int]) -> int:
    if kind == "string":
        return int(builder.CreateString(value))
    if kind == "blob":
        return int(builder.CreateByteVector(value))
    if kind == "int64s":
        builder.StartVector(8, len(value), 8)
        for number in reversed(value):
            builder.PrependInt64(number)
        return int(builder.EndVector())
    items = [_child(builder, kind.removesuffix("s"), item, done) for item in value]
    builder.StartVector(4, len(items), 4)
    for offset in reversed(items):
        builder.PrependUOffsetTRelative(offset)
    return int(builder.EndVector())


def tensor(
    name: bytes = b"w", dims: tuple[int, ...] = (2,), data: bytes | bytearray | None = b"\0" * 8, dtype: int = 1, *more: Field
) -> Fields:
    fields = [Field(0, "string", name), Field(2, "int64s", dims), Field(3, "int32", dtype), *more]
    return fields if data is None else [*fields, Field(4, "blob", data)]


def module(trainable: list[Fields], frozen: list[Fields] | None = None, *more: Field) -> Field:
    return Field(1, "table", [Field(0, "tables", trainable), Field(1, "tables", frozen or []), *more])


def checkpoint(*parts: Field, version: int = 2) -> Fields:
    return [Field(0, "int32", version), *parts]


def group(name: bytes = b"group0", states: list[Fields] | None = None, step: int = 3) -> Fields:
    return [Field(0, "string", name), Field(1, "int64", step), Field(3, "tables", states or [])]


def states(param: bytes, *moments: Fields) -> Fields:
    return [Field(0, "string", param), Field(1, "tables", list(moments))]


def properties(*, ints: list[Fields] | None = None, floats: list[Fields] | None = None, strings: list[Fields] | None = None) -> Field:
    return Field(3, "table", [Field(0, "tables", ints or []), Field(1, "tables", floats or []), Field(2, "tables", strings or [])])


def place(data: bytes | bytearray, *steps: int | str) -> int:
    """Position of a field: numbers are fields of tables, "0" the first element of a vector, "#" the count of the vector."""
    position = 0
    for step in steps:
        target = position + struct.unpack_from("<I", data, position)[0]
        if step == "#":
            return target
        if isinstance(step, str):
            position = target + 4 + 4 * int(step)
            continue
        vtable = target - struct.unpack_from("<i", data, target)[0]
        offset = struct.unpack_from("<H", data, vtable + 4 + 2 * step)[0]
        assert offset, f"no field {step}"
        position = target + offset
    return position


def poke(data: bytes, position: int, layout: str, value: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(f"<{layout}", changed, position, value)
    return bytes(changed)
