"""The codecs of each format for `structure`: written independently, so that they share no mistake with the readers under test."""

from __future__ import annotations

import io
import json
import math
import pickletools
import struct
import zipfile
from typing import Any

import h5py
import numpy as np
import torch

from torch_ort_ckpt.dtypes import TORCH_FROM_ONNX
from torch_ort_ckpt.formats.ort.flatbuffer import Field, build
from torch_ort_ckpt.formats.safetensors.file import DTYPES

from .structure import Codec

_LARGEST = 1 << 16
"""No size is fixed up to more than this: the point is the structure."""


# Flatbuffers: a table is {field number: [kind, value]}

SCHEMA: dict[str, dict[int, str]] = {
    "Checkpoint": {0: "int32", 1: "ModuleState", 2: "[OptimizerGroup]", 3: "PropertyBag"},
    "ModuleState": {0: "[Tensor]", 1: "[Tensor]", 2: "bool", 3: "bool"},
    "OptimizerGroup": {0: "string", 1: "int64", 2: "float32", 3: "[ParameterState]"},
    "ParameterState": {0: "string", 1: "[Tensor]"},
    "PropertyBag": {0: "[IntProperty]", 1: "[FloatProperty]", 2: "[StringProperty]"},
    "IntProperty": {0: "string", 1: "int64"},
    "FloatProperty": {0: "string", 1: "float32"},
    "StringProperty": {0: "string", 1: "string"},
    "Tensor": {0: "string", 1: "string", 2: "[int64]", 3: "int32", 4: "bytes", 5: "[string]", 6: "int64"},
}
_SCALARS = {"int32": "<i", "int64": "<q", "float32": "<f", "bool": "<?"}


def decode_flatbuffer(data: bytes) -> Any:
    if data[4:8] != b"ODTC":
        raise ValueError("a sidecar")
    return _table(data, struct.unpack_from("<I", data)[0], "Checkpoint")


def _table(data: bytes, table: int, kind: str) -> dict[int, list[Any]]:
    vtable = table - struct.unpack_from("<i", data, table)[0]
    fields = {}
    for number in range((struct.unpack_from("<H", data, vtable)[0] - 4) // 2):
        offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0]
        if offset:
            fields[number] = _field(data, table + offset, SCHEMA[kind][number])
    return fields


def _field(data: bytes, position: int, kind: str) -> list[Any]:
    if kind in _SCALARS:
        return [kind, struct.unpack_from(_SCALARS[kind], data, position)[0]]
    target = position + struct.unpack_from("<I", data, position)[0]
    if kind in SCHEMA:
        return ["table", _table(data, target, kind)]
    count = struct.unpack_from("<I", data, target)[0]
    if kind in ("string", "bytes"):
        return ["string", data[target + 4 : target + 4 + count]]
    item = kind.strip("[]")
    if item == "int64":
        return ["int64s", list(struct.unpack_from(f"<{count}q", data, target + 4))]
    values = [_field(data, target + 4 + 4 * index, item)[1] for index in range(count)]
    return ["strings" if item == "string" else "tables", values]


def encode_flatbuffer(tree: Any) -> bytes:
    return bytes(build(_fields(tree), b"ODTC").head)


def _fields(table: Any) -> list[Field]:
    return [Field(number, kind, _value(kind, value)) for number, (kind, value) in table.items() if 0 <= number < 64]


def _value(kind: str, value: Any) -> Any:
    if kind == "table":
        return _fields(value)
    return [_fields(item) for item in value] if kind == "tables" else value


def fix_flatbuffer(table: Any) -> None:
    """As many bytes as dims and type ask for, in every tensor."""
    for _, value in table.values():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                fix_flatbuffer(inner)
    dims, kind = (table.get(number, [None, None])[1] for number in (2, 3))
    if isinstance(dims, list) and kind in TORCH_FROM_ONNX:
        table[4] = ["string", _sized(table.get(4, ["string", b""])[1], math.prod(dims) * TORCH_FROM_ONNX[kind].itemsize)]


def _sized(data: Any, size: int) -> bytes:
    if not 0 <= size <= _LARGEST:
        raise ValueError("too large")
    return bytes(data)[:size].ljust(size, b"\1")


# Protobuf: a message is a list of [field number, wire type, value]; the value of wire type 2 is bytes or a message

_ENTRY: dict[int, Any] = {}
_TENSOR: dict[int, Any] = {13: _ENTRY}
_MODEL: dict[int, Any] = {7: {5: _TENSOR}}


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        value |= (data[position] & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if data[position - 1] < 0x80:
            return value, position


def _to_varint(value: int) -> bytes:
    value %= 1 << 64
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _message(data: bytes, schema: dict[int, Any] | None) -> list[list[Any]]:
    fields, position = [], 0
    value: Any
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
        else:
            size, position = _varint(data, position) if wire == 2 else ({1: 8, 5: 4}[wire], position)
            value, position = data[position : position + size], position + size
            if wire == 2 and schema is not None and number in schema:
                value = _message(value, schema[number])
        fields.append([number, wire, value])
    return fields


def _to_message(fields: Any) -> bytes:
    parts = []
    for number, wire, value in fields:
        content = _to_message(value) if isinstance(value, list) else value.encode() if isinstance(value, str) else value
        if wire == 0:
            content = _to_varint(content if isinstance(content, int) else len(content))
        elif isinstance(content, int):
            content = _to_varint(content)
        if wire == 2:
            content = _to_varint(len(content)) + content
        elif wire in (1, 5):
            content = bytes(content)[: 8 if wire == 1 else 4].ljust(8 if wire == 1 else 4, b"\0")
        parts.append(_to_varint(number % (1 << 29) << 3 | wire % 8) + content)
    return b"".join(parts)


def decode_sequence(data: bytes) -> Any:
    count, position = _varint(data, 0)
    messages = []
    for _ in range(count):
        size, position = _varint(data, position)
        messages.append(_message(data[position : position + size], _TENSOR))
        position += size
    return messages


def encode_sequence(messages: Any) -> bytes:
    encoded = [_to_message(message) for message in messages]
    return _to_varint(len(encoded)) + b"".join(_to_varint(len(message)) + message for message in encoded)


def fix_tensor(message: Any) -> None:
    """As many bytes of raw_data as dims and type ask for."""
    dims = [value for number, wire, value in message if (number, wire) == (1, 0)]
    kind = next((value for number, wire, value in message if (number, wire) == (2, 0)), None)
    for field in message:
        if field[:2] == [9, 2] and kind in TORCH_FROM_ONNX:
            field[2] = _sized(field[2], math.prod(dims) * TORCH_FROM_ONNX[kind].itemsize)


def fix_sequence(messages: Any) -> None:
    for message in messages:
        fix_tensor(message)


def fix_model(message: Any) -> None:
    for graph in (value for number, _, value in message if number == 7 and isinstance(value, list)):
        fix_sequence([value for number, _, value in graph if number == 5 and isinstance(value, list)])


# safetensors and its index


def decode_safetensors(data: bytes) -> Any:
    if data[:1] == b"{":
        return {"index": json.loads(data)}
    length = int.from_bytes(data[:8], "little")
    return {"header": json.loads(data[8 : 8 + length]), "data": data[8 + length :]}


def encode_safetensors(tree: Any) -> bytes:
    if "index" in tree:
        return json.dumps(tree["index"]).encode()
    text = json.dumps(tree["header"]).encode()
    return len(text).to_bytes(8, "little") + text + bytes(tree["data"])


def fix_safetensors(tree: Any) -> None:
    """Offsets end to end, in the order of the header, and as much data as they ask for."""
    end = 0
    for name, entry in tree.get("header", {}).items():
        if name != "__metadata__" and isinstance(entry, dict) and entry.get("dtype") in DTYPES:
            size = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
            entry["data_offsets"] = [end, end + size]
            end += size
    if "data" in tree:
        tree["data"] = _sized(tree["data"], end)


# HDF5: groups are dicts, datasets numpy arrays or text


def decode_hdf5(data: bytes) -> Any:
    def group(node: Any) -> dict[str, Any]:
        return {name: group(item) if isinstance(item, h5py.Group) else _dataset(item) for name, item in node.items()}

    with h5py.File(io.BytesIO(data), "r") as file:
        return group(file)


def _dataset(item: Any) -> Any:
    value = item[()]
    if isinstance(value, bytes):
        return value.decode()
    return value.item() if isinstance(value, np.generic) else torch.from_numpy(value) if value.dtype != object else value.tolist()


def encode_hdf5(tree: Any) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w", libver="latest" if "latest" in tree else "earliest") as root:
        _store(root, tree)
    return file.getvalue()


def _store(group: Any, tree: dict[str, Any]) -> None:
    for name, value in tree.items():
        if isinstance(value, dict):
            _store(group.create_group(name), value)
        elif value is None:
            group[name] = h5py.Empty("f4")
        elif value == "..":
            group[name] = h5py.SoftLink("/model")
        elif value == "/etc/passwd":
            group[name] = h5py.ExternalLink(value, "/")
        elif isinstance(value, torch.Tensor) and value.numel() > 100 and value.shape[0] % 2:
            group.create_dataset(name, data=value.numpy(), chunks=True, compression="gzip")
        elif isinstance(value, torch.Tensor):
            group[name] = value.numpy()
        else:
            group[name] = value


# Pickles: a list of opcodes, each as bytes, or as [opcode, argument] where that is a text or a number


def decode_pickle(data: bytes) -> Any:
    found = list(pickletools.genops(data))
    ends = [position for _, _, position in found[1:]] + [len(data)]
    ops: list[Any] = []
    for (op, argument, position), end in zip(found, ends, strict=True):
        if op.name in ("BINUNICODE", "SHORT_BINUNICODE"):
            ops.append(["text", argument])
        elif op.name in ("BININT", "BININT1", "BININT2", "LONG1"):
            ops.append(["number", argument])
        elif op.name != "FRAME":  # optional lengths
            ops.append(data[position:end])
    return ops


def encode_pickle(ops: Any) -> bytes:
    return b"".join(op if isinstance(op, bytes) else _OPS[op[0]](op[1]) for op in ops)


def _long(value: Any) -> bytes:
    number = int(value).to_bytes((int(value).bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(number)]) + number


def _text(value: Any) -> bytes:
    content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
    return b"X" + len(content).to_bytes(4, "little") + content


_OPS = {"text": _text, "number": _long}


# torch.save: the objects, or the archive's records


def decode_objects(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def encode_objects(tree: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


def decode_archive(data: bytes) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records: dict[str, Any] = {name: archive.read(name) for name in archive.namelist()}
    return {name: decode_pickle(content) if name.endswith("/data.pkl") else content for name, content in records.items()}


def encode_archive(tree: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in tree.items():
            info = zipfile.ZipInfo(name)
            archive.writestr(info, encode_pickle(content) if isinstance(content, list) else content)
    return file.getvalue()


FLATBUFFER = Codec(decode_flatbuffer, encode_flatbuffer, fix_flatbuffer)
SEQUENCE = Codec(decode_sequence, encode_sequence, fix_sequence)
MODEL = Codec(lambda data: _message(data, _MODEL), _to_message, fix_model)
SAFETENSORS = Codec(decode_safetensors, encode_safetensors, fix_safetensors)
HDF5 = Codec(decode_hdf5, encode_hdf5)
PICKLE = Codec(decode_pickle, encode_pickle)
OBJECTS = Codec(decode_objects, encode_objects)
ARCHIVE = Codec(decode_archive, encode_archive)
