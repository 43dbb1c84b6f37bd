"""The part of HDF5 that h5py wrote for ORTTrainer, read in place without a library.

Groups are symbol tables, datasets are contiguous, strings are in global heaps: HDF5's earliest layout, h5py's default. Every address and
length is checked before use, so a damaged file gives an error (libhdf5 itself can loop for minutes on one). Files in the newer, checksummed
layout are opened with h5py (`hdf5_library.py`). Links, virtual and external datasets lead out of the file and are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ...checkpoint.state import Value
from ...errors import CorruptFileError, UnsupportedError
from ...storage.buffers import FileBuffer
from ...storage.files import string_array
from ..shapes import element_count

SIGNATURE = b"\x89HDF\r\n\x1a\n"
UNDEFINED = (1 << 64) - 1
MAX_DEPTH = 64

Tree: TypeAlias = dict[str, Any]
"""Names to tensors, string arrays or further trees."""

_FLOATS = {(2, 10, 5, 0, 10, 15): torch.float16, (4, 23, 8, 0, 23, 127): torch.float32, (8, 52, 11, 0, 52, 1023): torch.float64}
"""Size, exponent position and size, mantissa position and size, bias -> IEEE type."""

_INTEGERS = {
    (1, True): torch.int8,
    (2, True): torch.int16,
    (4, True): torch.int32,
    (8, True): torch.int64,
    (1, False): torch.uint8,
    (2, False): torch.uint16,
    (4, False): torch.uint32,
    (8, False): torch.uint64,
}

_BOOLEANS = (b"FALSE\0\0\0TRUE\0\0\0\0\0\1", b"FALSE\0TRUE\0\0\1")
"""h5py's bool: an enumeration of FALSE = 0 and TRUE = 1."""


def read_tree(buffer: FileBuffer) -> Tree:
    """Everything in the file. Tensors alias `buffer`."""
    if bytes(buffer.data[:8]) != SIGNATURE:
        raise CorruptFileError("not an HDF5 file", path=buffer.path)
    from .hdf5_library import read_new_tree

    if buffer.size > 8 and buffer.data[8] >= 2:
        return read_new_tree(buffer)
    try:
        return _File(buffer).tree()
    except DenseLinks:
        return read_new_tree(buffer)


@dataclass
class Type:
    """An element type; None as dtype for strings of any length."""

    dtype: torch.dtype | None
    size: int


class DenseLinks(Exception):
    """A group that needs libhdf5."""


class _File:
    def __init__(self, buffer: FileBuffer) -> None:
        self.buffer = buffer
        self.visited: set[int] = set()
        self.claims = Claims(buffer)
        self.heaps: dict[int, dict[int, tuple[int, int]]] = {}
        self.spent = 0

    def spend(self, amount: int, where: str) -> None:
        """Count the bytes visited: structures that do not overlap can't exceed the file size, so overlapping ones are detected here."""
        self.spent += amount
        if self.spent > 4 * self.buffer.size:
            raise self.error("structures that overlap", where)

    def error(self, message: str, where: str) -> CorruptFileError:
        return CorruptFileError(message, path=self.buffer.path, field=where or "/")

    def take(self, position: int, count: int, where: str) -> bytes:
        if position < 0 or count < 0 or position + count > self.buffer.size:
            raise self.error(f"needs bytes {position} to {position + count}, the file ends at {self.buffer.size}", where)
        return bytes(self.buffer.data[position : position + count])

    def unpack(self, layout: str, position: int, where: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self.take(position, struct.calcsize(f"<{layout}"), where))

    def tree(self) -> Tree:
        version, offsets, lengths = self.take(8, 1, "superblock")[0], *self.take(13, 2, "superblock")
        if offsets != 8 or lengths != 8:
            raise UnsupportedError("an HDF5 file with addresses of other than 8 bytes", path=self.buffer.path)
        base = 24 if version == 0 else 28
        (start,) = self.unpack("Q", base, "superblock")
        if start != 0:
            raise UnsupportedError("an HDF5 file with a user block", path=self.buffer.path)
        (root,) = self.unpack("Q", base + 40, "superblock")
        tree = self.object(root, "", 0)
        if not isinstance(tree, dict):
            raise self.error("the root is not a group", "")
        return tree

    def object(self, address: int, where: str, depth: int) -> Any:
        if address in self.visited:
            raise UnsupportedError("an object that is linked twice", path=self.buffer.path, field=where)
        if depth > MAX_DEPTH:
            raise self.error(f"nested deeper than {MAX_DEPTH}", where)
        self.visited.add(address)
        found = list(self.messages(address, where))
        messages = dict(found)
        if 0x02 in messages or 0x06 in messages:
            self.refuse_dense(messages.get(0x02, b""), where)
            return self.members((self.link(content, where) for kind, content in found if kind == 0x06), where, depth)
        if 0x11 in messages:
            btree, heap = struct.unpack("<QQ", self.sized(messages[0x11], 16, where))
            return self.group(btree, heap, where, depth)
        if not {0x01, 0x03, 0x08} <= messages.keys():
            raise self.error("neither a group nor a dataset", where)
        if 0x07 in messages:
            raise UnsupportedError("its data is in external files", path=self.buffer.path, field=where)
        if 0x0B in messages:
            raise UnsupportedError("compressed or filtered data", path=self.buffer.path, field=where, remedy=REPACK)
        return self.dataset(messages, where)

    def messages(self, address: int, where: str) -> Iterator[tuple[int, bytes]]:
        """Type and content of each message of an object header."""
        version, _, count, _, size = self.unpack("BBHII", address, where)
        if version != 1:
            raise self.error(f"version {version} of an object header", where)
        blocks, seen = [(address + 16, size)], 0
        for position, length in blocks:
            end = position + length
            self.spend(length, where)
            while position + 8 <= end and seen < count:
                kind, size, flags = self.unpack("HHB", position, where)
                content = self.take(position + 8, size, where)
                if position + 8 + size > end:
                    raise self.error("a message longer than its header", where)
                position += 8 + size
                seen += 1
                if kind == 0x10:
                    if len(blocks) > 64:
                        raise self.error("an object header in too many pieces", where)
                    blocks.append(struct.unpack("<QQ", self.sized(content, 16, where)))
                elif flags & 2:
                    raise UnsupportedError("shares its description with another object", path=self.buffer.path, field=where, remedy=REPACK)
                elif kind:
                    yield kind, content

    def sized(self, content: bytes, size: int, where: str) -> bytes:
        if len(content) < size:
            raise self.error("a message shorter than its content", where)
        return content[:size]

    # Groups

    def group(self, btree: int, heap: int, where: str, depth: int) -> Tree:
        magic, version, size, _, segment = self.unpack("4sB3xQQQ", heap, where)
        if magic != b"HEAP" or version != 0 or segment + size > self.buffer.size:
            raise self.error("expected a heap of names", where)
        return self.members(self.symbols(btree, segment, size, where), where, depth)

    def members(self, links: Iterable[tuple[str, int]], where: str, depth: int) -> Tree:
        tree: Tree = {}
        for name, address in links:
            place = f"{where}/{name}" if where else name
            if not name or name in tree or "/" in name:
                raise self.error(f"invalid name {name!r}", place)
            tree[name] = self.object(address, place, depth + 1)
        return tree

    def symbols(self, btree: int, segment: int, size: int, where: str) -> Iterator[tuple[str, int]]:
        """Name and address of everything in a symbol table."""
        for name_at, address, kind in self.entries(btree, where):
            end = self.buffer.data.find(b"\0", segment + name_at, segment + size) if name_at < size else -1
            if end < 0:
                raise self.error("a name outside its heap", where)
            self.spend(end - segment - name_at, where)
            name = self.take(segment + name_at, end - segment - name_at, where).decode("utf-8", "surrogateescape")
            if kind == 2:
                raise UnsupportedError("a symbolic link", path=self.buffer.path, field=f"{where}/{name}")
            yield name, address

    def link(self, content: bytes, where: str) -> tuple[str, int]:
        """A link message, which h5py writes where names are not ASCII."""
        version, flags = self.sized(content, 2, where)
        kind = self.sized(content, 3, where)[2] if flags & 8 else 0
        position = 2 + bool(flags & 8) + 8 * bool(flags & 4) + bool(flags & 16)
        width = 1 << (flags & 3)
        length = int.from_bytes(self.sized(content, position + width, where)[position:], "little")
        position += width
        name = self.sized(content, position + length, where)[position:].decode("utf-8", "surrogateescape")
        if version != 1 or kind != 0:
            raise UnsupportedError("a link that may lead to another file", path=self.buffer.path, field=f"{where}/{name}")
        position += length
        return name, int.from_bytes(self.sized(content, position + 8, where)[position:], "little")

    def refuse_dense(self, content: bytes, where: str) -> None:
        """Many links with such names are in a heap of their own, which only libhdf5 can read."""
        if not content:
            return
        position = 2 + 8 * (self.sized(content, 2, where)[1] & 1)
        heap = int.from_bytes(self.sized(content, position + 8, where)[position:], "little")
        if heap != UNDEFINED:
            if self.take(heap, 4, where) == b"FRHP":
                raise DenseLinks
            raise self.error("expected a heap of links", where)

    def entries(self, address: int, where: str) -> Iterator[tuple[int, int, int]]:
        """Name offset, object address and kind of each symbol below a B-tree node."""
        waiting = [(address, -1)]
        while waiting:
            address, below = waiting.pop()
            if address in self.visited:
                raise self.error("a node that is reached twice", where)
            self.visited.add(address)
            magic, kind, level, used = self.unpack("4sBBH", address, where)
            if magic == b"TREE":
                if kind != 0 or (below >= 0 and level != below - 1):
                    raise self.error("a misplaced B-tree node", where)
                content = self.unpack(f"{2 * used}Q", address + 32, where) if used else ()
                waiting += [(child, level) for child in reversed(content[0::2])] if level >= 0 else []
            elif magic == b"SNOD" and below == 0:
                self.spend(40 * used, where)
                for index in range(used):
                    yield self.unpack("QQI", address + 8 + 40 * index, where)
            else:
                raise self.error("expected a B-tree node", where)

    # Datasets

    def dataset(self, messages: dict[int, bytes], where: str) -> Value:
        shape = self.shape(messages[0x01], where)
        kind = self.type(messages[0x03], where)
        count = element_count(shape)
        size = count * kind.size
        layout = messages[0x08]
        version, storage = self.sized(layout, 2, where)
        if version != 3 or storage not in (0, 1):
            raise UnsupportedError("chunked or virtual data", path=self.buffer.path, field=where, remedy=REPACK)
        if storage == 0:
            (length,) = struct.unpack("<H", self.sized(layout, 4, where)[2:])
            content: bytes | None = self.sized(layout, 4 + length, where)[4:]
            address = 0
        else:
            address, length = struct.unpack("<QQ", self.sized(layout, 18, where)[2:])
            content = None
            if address == UNDEFINED and length == 0 and count == 0:
                address = 0
        if length != size:
            raise self.error(f"holds {length} bytes, its shape and type need {size}", where)
        if content is None and address + size > self.buffer.size:
            raise self.error(f"needs bytes {address} to {address + size}, the file ends at {self.buffer.size}", where)
        try:
            if kind.dtype is None:
                return string_array(self.strings(content, address, count, where), shape)
            if content is not None:
                return (
                    torch.frombuffer(bytearray(content), dtype=kind.dtype).reshape(shape)
                    if content
                    else torch.empty(shape, dtype=kind.dtype)
                )
            self.claims.add(address, size, where)
            return self.buffer.tensor(address, kind.dtype, shape, count)
        except (RuntimeError, OverflowError, TypeError, ValueError) as error:
            raise self.error(f"impossible shape {shape[:8]} ({str(error).splitlines()[0]})", where) from error

    def shape(self, content: bytes, where: str) -> tuple[int, ...]:
        version, rank, _, kind = self.sized(content, 4, where)
        if version not in (1, 2) or rank > 32 or (version == 2 and kind == 2):
            raise self.error("not a valid shape", where)
        start = 8 if version == 1 else 4
        return struct.unpack(f"<{rank}Q", self.sized(content, start + 8 * rank, where)[start:])

    def type(self, content: bytes, where: str) -> Type:
        first, bits, size = struct.unpack("<B3sI", self.sized(content, 8, where))
        kind = first & 0x0F
        if kind == 0 and not bits[0] & 1 and struct.unpack("<HH", self.sized(content, 12, where)[8:]) == (0, 8 * size):
            dtype = _INTEGERS.get((size, bool(bits[0] & 8)))
        elif kind == 1 and not bits[0] & 0x41:
            offset, precision, *rest, bias = struct.unpack("<HHBBBBI", self.sized(content, 20, where)[8:])
            dtype = _FLOATS.get((size, *rest, bias)) if (offset, precision) == (0, 8 * size) else None
        elif kind == 8 and bits[0] == 2 and size == 1 and content[20:].startswith(_BOOLEANS):
            dtype = torch.bool
        elif kind == 9 and bits[0] & 0x0F == 1 and size == 16:
            return Type(None, 16)
        else:
            dtype = None
        if dtype is None:
            raise UnsupportedError(
                f"an element type that checkpoints do not have (HDF5 class {kind}, {size} bytes)", path=self.buffer.path, field=where
            )
        return Type(dtype, size)

    def strings(self, content: bytes | None, address: int, count: int, where: str) -> list[str]:
        texts = []
        self.spend(16 * count, where)
        raw = content if content is not None else self.take(address, 16 * count, where)
        for length, heap, index in struct.iter_unpack("<IQI", raw):
            if not length:
                texts.append("")
                continue
            if heap not in self.heaps:
                self.heaps[heap] = self.heap(heap, where)
            position, stored = self.heaps[heap].get(index, (0, 0))
            if length > stored:
                raise self.error("refers to a string that does not exist", where)
            self.spend(length, where)
            texts.append(self.take(position, length, where).decode("utf-8", "surrogateescape"))
        return texts

    def heap(self, address: int, where: str) -> dict[int, tuple[int, int]]:
        """Where each object of a global heap is, and how long."""
        magic, version, size = self.unpack("4sB3xQ", address, where)
        if magic != b"GCOL" or version != 1 or address + size > self.buffer.size:
            raise self.error("expected a heap of strings", where)
        objects = {}
        position, end = address + 16, address + size
        while position + 16 <= end:
            number, stored = self.unpack("HxxxxxxQ", position, where)
            if number == 0 or position + 16 + stored > end:
                break
            self.spend(16, where)
            objects[number] = position + 16, stored
            position += 16 + stored + -stored % 8
        return objects


class Claims:
    """Bytes in use: data that does not overlap can't exceed the file size, which also bounds copies."""

    def __init__(self, buffer: FileBuffer) -> None:
        self.buffer = buffer
        self.extents: list[tuple[int, int, str]] = []
        self.total = 0

    def add(self, start: int, size: int, where: str) -> None:
        if not size:
            return
        self.total += size
        self.extents.append((start, start + size, where))
        if self.total > self.buffer.size:
            end, before = 0, ""
            for first, last, name in sorted(self.extents):
                if first < end:
                    raise CorruptFileError(f"overlaps the data of {before!r}", path=self.buffer.path, field=name)
                end, before = last, name


REPACK = "Rewrite it plainly with `h5repack -l CONTI -f NONE`."
