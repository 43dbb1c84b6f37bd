"""`onnx.TensorProto` messages in delimited sequences, read in place and written as a stream.

A `.pbseq` file is a varint count, then per message a varint length and the message. Every length is checked against the
bytes that are there before anything is allocated. `raw_data` (and packed floats) become tensors that alias the mapped file; protobuf's own
parser would copy them, and stops at 2 GiB per message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import torch

from ...checkpoint.state import Value, is_string, nbytes
from ...dtypes import ONNX_FROM_TORCH, STRING, TORCH_FROM_ONNX, short_name
from ...errors import CorruptFileError, UnsupportedError
from ...storage.buffers import FileBuffer
from ...storage.files import Progress, string_array, write_tensor
from ...storage.paths import PathLike
from ..ort.extras import to_float32
from ..shapes import element_count
from ..soundness import encode_string

MAX_MESSAGE = (1 << 31) - 1
"""The longest message that protobuf, and so ORT, can read."""

_MASK = (1 << 64) - 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DIMS, _TYPE, _FLOATS, _INT32S, _STRINGS, _INT64S, _NAME, _RAW, _DOUBLES, _UINT64S, _EXTERNAL, _LOCATION = (
    1,
    2,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    11,
    13,
    14,
)

_TYPED_FIELD = {
    1: _FLOATS,
    7: _INT64S,
    11: _DOUBLES,
    12: _UINT64S,
    13: _UINT64S,
    14: _FLOATS,
    15: _DOUBLES,
    **dict.fromkeys((2, 3, 4, 5, 6, 9, 10, 16, 17, 18, 19, 20), _INT32S),
}
"""Which of the typed fields holds the elements of a type, where they are not in `raw_data`."""

_BITS = {10: np.uint16, 16: np.uint16, 17: np.uint8, 18: np.uint8, 19: np.uint8, 20: np.uint8}
"""Types whose `int32_data` holds bit patterns."""

External = Callable[[dict[str, str], int, str], tuple[FileBuffer, int]]
"""Finds external data: its entries, the bytes needed and the tensor's name -> the file and the offset in it."""


class Message:
    """One message: a range of a file's bytes."""

    def __init__(self, buffer: FileBuffer, start: int, end: int, where: str) -> None:
        self.buffer, self.start, self.end, self.where = buffer, start, end, where

    def error(self, message: str) -> CorruptFileError:
        return CorruptFileError(message, path=self.buffer.path, field=self.where)

    def varint(self, position: int) -> tuple[int, int]:
        """The value at `position` (64 bits at most) and where it ends."""
        value = 0
        for shift in range(0, 70, 7):
            if position >= self.end:
                raise self.error("ends in the middle of a number")
            byte = self.buffer.data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value > _MASK:
                    break
                return value, position
        raise self.error("a number of more than 64 bits")

    def fields(self) -> Iterator[tuple[int, int, int, int]]:
        """Number, wire type and byte range of each field; for varints the value and 0 instead of the range."""
        position = self.start
        while position < self.end:
            key, position = self.varint(position)
            number, wire = key >> 3, key & 7
            if number == 0 or number >= 1 << 29:
                raise self.error(f"field number {number}")
            if wire == _VARINT:
                value, position = self.varint(position)
                yield number, wire, value, 0
                continue
            if wire == _BYTES:
                length, position = self.varint(position)
            elif wire in (_FIXED64, _FIXED32):
                length = 8 if wire == _FIXED64 else 4
            else:
                raise self.error(f"wire type {wire} in field {number}")
            if length > self.end - position:
                raise self.error(f"field {number} claims {length} bytes, {self.end - position} are left")
            yield number, wire, position, position + length
            position += length

    def text(self, start: int, end: int) -> str:
        return bytes(self.buffer.data[start:end]).decode("utf-8", "surrogateescape")


def sequence(buffer: FileBuffer) -> list[Message]:
    """The messages of a `.pbseq` file."""
    whole = Message(buffer, 0, buffer.size, "sequence")
    count, position = whole.varint(0)
    if count > buffer.size - position:
        raise whole.error(f"claims {count} messages in {buffer.size - position} bytes")
    messages = []
    for index in range(count):
        length, position = whole.varint(position)
        if length > buffer.size - position:
            raise whole.error(f"message {index} claims {length} bytes, {buffer.size - position} are left")
        messages.append(Message(buffer, position, position + length, f"message {index}"))
        position += length
    if position != buffer.size:
        raise whole.error(f"{buffer.size - position} bytes after the last message")
    return messages


def string_entry(message: Message) -> tuple[str, str]:
    """A `StringStringEntryProto`: key and value."""
    parts = {1: "", 2: ""}
    for number, wire, start, end in message.fields():
        if number in parts:
            if wire != _BYTES:
                raise message.error(f"field {number} is not text")
            parts[number] = message.text(start, end)
    return parts[1], parts[2]


def tensor(message: Message, external: External | None = None) -> tuple[str, Value]:
    """A `TensorProto`: its name and its value."""
    return _TensorFields(message).decode(external)


def external_number(text: str | None, key: str, default: int, path: PathLike, name: str) -> int:
    """The `offset` or `length` of external data."""
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise CorruptFileError(f"{key} is not a number of bytes", path=path, field=name)
    return int(text)


class _TensorFields:
    """The fields of one `TensorProto`, collected in one pass before they are used."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.dims: list[int] = []
        self.type, self.name, self.outside = 0, "", False
        self.raw: tuple[int, int] | None = None
        self.typed: dict[int, list[tuple[int, int, int]]] = {}
        self.strings: list[str] = []
        self.entries: dict[str, str] = {}
        for number, wire, start, end in message.fields():
            if number == _DIMS and wire in (_VARINT, _BYTES):
                self.dims += [start] if wire == _VARINT else _varints(message, start, end).tolist()
            elif number == _TYPE and wire == _VARINT:
                self.type = start
            elif number == _LOCATION and wire == _VARINT:
                self.outside = start == 1
            elif number == _NAME and wire == _BYTES:
                self.name = message.text(start, end)
            elif number == _RAW and wire == _BYTES:
                self.raw = start, end
            elif number == _STRINGS and wire == _BYTES:
                self.strings.append(message.text(start, end))
            elif number == _EXTERNAL and wire == _BYTES:
                key, value = string_entry(Message(message.buffer, start, end, message.where))
                self.entries[key] = value
            elif number in (_FLOATS, _INT32S, _INT64S, _DOUBLES, _UINT64S):
                self.typed.setdefault(number, []).append((wire, start, end))
            elif number in (_DIMS, _TYPE, _LOCATION, _NAME, _RAW, _STRINGS, _EXTERNAL):
                raise message.error(f"wire type {wire} in field {number}")
        message.where = f"{message.where} ({self.name})"

    def decode(self, external: External | None) -> tuple[str, Value]:
        shape, count = self.shape()
        if self.type == STRING:
            if len(self.strings) != count or self.raw is not None or self.outside:
                raise self.message.error(f"holds {len(self.strings)} strings, its shape needs {count}")
            return self.name, self._shaped(lambda: string_array(self.strings, shape))
        dtype = TORCH_FROM_ONNX.get(self.type)
        if dtype is None:
            raise UnsupportedError(
                f"element type {self.type}, which PyTorch does not have", path=self.message.buffer.path, field=self.message.where
            )
        size = count * dtype.itemsize
        if self.outside:
            if external is None or self.raw is not None or self.typed:
                raise self.message.error("external data where there can be none")
            buffer, offset = external(self.entries, size, self.name)
            return self.name, self._shaped(lambda: buffer.tensor(offset, dtype, shape, count))
        if self.raw is not None and (self.raw[0] < self.raw[1] or not self.typed):
            start, end = self.raw
            if any(self.typed.values()):
                raise self.message.error("has both raw and typed data")
            if end - start != size:
                raise self.message.error(f"holds {end - start} bytes, its shape and type need {size}")
            return self.name, self._shaped(lambda: self.message.buffer.tensor(start, dtype, shape, count))
        return self.name, self._shaped(lambda: self._typed(dtype, count).reshape(shape))

    def shape(self) -> tuple[tuple[int, ...], int]:
        dims = tuple(size - (1 << 64) if size >> 63 else size for size in self.dims)
        try:
            return dims, element_count(dims)
        except ValueError as error:
            raise self.message.error(str(error)) from error

    def _shaped(self, make: Callable[[], Value]) -> Value:
        try:
            return make()
        except (RuntimeError, OverflowError, TypeError, ValueError) as error:
            raise self.message.error(f"impossible shape {tuple(self.dims[:8])} ({str(error).splitlines()[0]})") from error

    def _typed(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        number = _TYPED_FIELD[self.type]
        if self.typed.keys() - {number}:
            raise self.message.error(f"field {min(self.typed.keys() - {number})} can't hold elements of type {self.type}")
        parts = self.typed.get(number, [])
        if number in (_FLOATS, _DOUBLES):
            return self._floats(parts, dtype, count)
        if count > sum(end - start if wire == _BYTES else 1 for wire, start, end in parts):  # each element takes a byte at least
            raise self.message.error(f"its shape needs {count} elements")
        arrays = [
            _varints(self.message, start, end) if wire == _BYTES else np.array([start], np.uint64)
            for wire, start, end in parts
            if self._is_varint(wire)
        ]
        values = np.concatenate(arrays) if arrays else np.empty(0, np.uint64)
        if len(values) != count:
            raise self.message.error(f"holds {len(values)} elements, its shape needs {count}")
        if number == _UINT64S:
            target: Any = np.dtype(np.uint32 if self.type == 12 else np.uint64)
            limits = (0, int(np.iinfo(target).max))
        else:
            values = values.view(np.int64)
            target = np.dtype(_BITS[self.type]) if self.type in _BITS else torch.empty(0, dtype=dtype).numpy().dtype
            limits = (0, 1) if self.type == 9 else (int(np.iinfo(target).min), int(np.iinfo(target).max))
        if count and not limits[0] <= int(values.min()) <= int(values.max()) <= limits[1]:
            raise self.message.error(f"an element does not fit {short_name(dtype)}")
        return torch.from_numpy(values.astype(target)).view(dtype)

    def _floats(self, parts: list[tuple[int, int, int]], dtype: torch.dtype, count: int) -> torch.Tensor:
        fixed = _FIXED32 if _TYPED_FIELD[self.type] == _FLOATS else _FIXED64
        if any(wire not in (_BYTES, fixed) for wire, _, _ in parts):
            raise self.message.error("elements with the wrong wire type")
        size = sum(end - start for _, start, end in parts)
        if size != count * dtype.itemsize:
            raise self.message.error(f"holds {size} bytes, its shape and type need {count * dtype.itemsize}")
        if len(parts) == 1:
            return self.message.buffer.tensor(parts[0][1], dtype, (count,), count)
        joined = bytearray().join(self.message.buffer.data[start:end] for _, start, end in parts)
        return torch.frombuffer(joined, dtype=dtype) if joined else torch.empty(0, dtype=dtype)

    def _is_varint(self, wire: int) -> bool:
        if wire not in (_VARINT, _BYTES):
            raise self.message.error("elements with the wrong wire type")
        return True


def _varints(message: Message, start: int, end: int) -> np.ndarray:
    """Packed varints as uint64, decoded a stretch at a time: the working memory stays small compared with the result."""
    results = []
    while start < end:
        stretch = np.frombuffer(message.buffer.data, np.uint8, min(end - start, 1 << 20), start)
        ends = np.flatnonzero(stretch < 0x80)
        if not len(ends):
            raise message.error("ends in the middle of a number")
        starts = np.concatenate(([0], ends[:-1] + 1))
        lengths = ends - starts + 1
        longest = int(lengths.max())
        if longest > 10 or bool((stretch[ends[lengths == 10]] > 1).any()):
            raise message.error("a number of more than 64 bits")
        values = np.zeros(len(ends), np.uint64)
        for index in range(longest):
            present = lengths > index
            values[present] |= (stretch[starts[present] + index] & 0x7F).astype(np.uint64) << np.uint64(7 * index)
        results.append(values)
        start += int(ends[-1]) + 1
    return np.concatenate(results) if results else np.empty(0, np.uint64)


# Writing


def write_sequence(file: BinaryIO, messages: list[tuple[bytes, torch.Tensor | None]], progress: Progress | None = None) -> None:
    """Messages given as their bytes and, optionally, a tensor whose bytes follow as the end of the message."""
    file.write(varint(len(messages)))
    for head, tail in messages:
        file.write(varint(len(head) + (nbytes(tail) if tail is not None else 0)) + head)
        if tail is not None:
            write_tensor(file, tail, progress)


def encode_tensor(name: str, value: Value, path: PathLike, where: str) -> tuple[bytes, torch.Tensor | None]:
    """A `TensorProto` in ORT's own field order, `raw_data` last so that the tensor can be streamed."""
    head = tensor_head(name, value, path, where)
    if is_string(value):
        texts = [encode_string(text, path, f"{where}/{name}") for text in value.reshape(-1).tolist()]
        shape, rest = head
        return shape + b"".join(_field(_STRINGS, text) for text in texts) + rest, None
    message = b"".join(head) + varint(_RAW << 3 | _BYTES) + varint(nbytes(value))
    if len(message) + nbytes(value) > MAX_MESSAGE:
        raise UnsupportedError(
            f"{nbytes(value)} bytes in one tensor, more than the 2 GiB of a protobuf message",
            path=path,
            field=f"{where}/{name}",
            remedy="Write format ort with external_data=True.",
        )
    return message, value


def tensor_head(name: str, value: Value, path: PathLike, where: str) -> tuple[bytes, bytes]:
    """The fields before a tensor's data: shape and type, and name (string data goes between the two)."""
    if is_string(value):
        number = STRING
    elif value.is_meta:
        raise UnsupportedError(
            "has no data (a meta tensor)", path=path, field=f"{where}/{name}", remedy="Complete the nominal state first."
        )
    else:
        number = ONNX_FROM_TORCH.get(value.dtype, 0)
        if not number:
            raise UnsupportedError(f"ONNX has no element type {short_name(value.dtype)}", path=path, field=f"{where}/{name}")
    dims = b"".join(varint(_DIMS << 3) + varint(size) for size in value.shape)
    return dims + varint(_TYPE << 3) + varint(number), _field(_NAME, encode_text(name, path))


def encode_scalar(name: str, value: int | float | str, path: PathLike) -> tuple[bytes, None]:
    """A property: a 0-dim `TensorProto` with its value in a typed field, as ORT writes them."""
    if isinstance(value, str):
        kind, data = STRING, _field(_STRINGS, encode_string(value, path, name))
    elif isinstance(value, float):
        kind, data = 1, _field(_FLOATS, struct.pack("<f", to_float32(value)))
    else:
        kind, data = 7, _field(_INT64S, varint(value & _MASK))
    name_field = _field(_NAME, encode_text(name, path))
    return varint(_TYPE << 3) + varint(kind) + data + name_field, None


def encode_external(name: str, value: torch.Tensor, location: str, offset: int, path: PathLike) -> tuple[bytes, None]:
    """A `TensorProto` whose data is in another file."""
    entries = {"location": location, "offset": str(offset), "length": str(nbytes(value))}
    outside = b"".join(_field(_EXTERNAL, encode_entry(key, text, path)) for key, text in entries.items())
    return b"".join(tensor_head(name, value, path, "tensors")) + outside + varint(_LOCATION << 3) + varint(1), None


def encode_entry(key: str, value: str, path: PathLike) -> bytes:
    """A `StringStringEntryProto`."""
    return _field(1, encode_text(key, path)) + _field(2, encode_string(value, path, key))


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_text(name: str, path: PathLike) -> bytes:
    try:
        return name.encode()
    except (UnicodeEncodeError, AttributeError) as error:
        raise UnsupportedError("a name that is not Unicode text", path=path, field=repr(name)) from error


def _field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | _BYTES) + varint(len(content)) + content
