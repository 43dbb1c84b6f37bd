"""The two containers of `torch.save`, read in place: the zip archive, and the older stream of pickles.

Every record is checked against the file before a tensor is made of it: stored without compression, inside the archive, no two over the
same bytes, and as long as the pickle says. When mapped, tensors alias the file and the checksums are not checked (that would read
everything); otherwise they are.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...errors import CorruptFileError, UnsupportedError
from ...storage.buffers import FileBuffer
from . import pickled
from .objects import KNOWN, Objects, storage_identity

T = TypeVar("T")
ZIP_ERRORS = (zipfile.BadZipFile, OSError, EOFError, LookupError, ValueError, RuntimeError, ArithmeticError, struct.error)
"""What `zipfile` raises on damaged files."""

MAGIC = b"PK\x03\x04"
_ALIGNMENT = 64  # where torch.save puts the data of a record, counted from the start of the archive
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C


def load(buffer: FileBuffer, *, checksums: bool) -> Any:
    """What `torch.load` would return for a file of tensors and plain data, over the bytes of `buffer`."""
    if bytes(buffer.data[:4]) == MAGIC:
        archive = Archive(buffer, 0, buffer.size, checksums=checksums)
        data = archive.pickle()
        return _guarded(buffer, lambda: Objects(archive.storage, buffer.path, len(data)).plain(pickled.read(data, KNOWN)[0]))
    return _guarded(buffer, lambda: _legacy(buffer))


def load_tensor(buffer: FileBuffer, start: int, end: int, where: str) -> torch.Tensor:
    """The one tensor of an archive that is a part of a file, in memory of its own."""
    archive = Archive(buffer, start, end, checksums=True, private=True)
    data = archive.pickle()
    return _guarded(buffer, lambda: Objects(archive.storage, buffer.path, len(data)).tensor(pickled.read(data, KNOWN)[0], where))


def _guarded(buffer: FileBuffer, make: Callable[[], T]) -> T:
    try:
        return make()
    except pickled.UnknownNameError as error:
        raise UnsupportedError(
            f"holds Python objects that only unsafe unpickling could read ({error.name})",
            path=buffer.path,
            remedy="Save tensors and plain numbers only. What could run code is never loaded.",
        ) from error
    except pickled.PickleError as error:
        raise CorruptFileError(f"not a file of torch.save ({error})", path=buffer.path) from error


def opened(path: Path) -> zipfile.ZipFile:
    """The archive for a first look at it. Whatever its directory says, no more is read than the file has."""
    buffer = FileBuffer(path, kept=False)
    return zipfile.ZipFile(_Window(buffer, 0, buffer.size))


class Archive:
    """A zip archive of `torch.save` in a range of a file."""

    def __init__(self, buffer: FileBuffer, start: int, end: int, *, checksums: bool, private: bool = False) -> None:
        self.buffer, self.start, self.end, self.checksums, self.private = buffer, start, end, checksums, private
        self.flat: dict[str, torch.Tensor] = {}
        try:
            with zipfile.ZipFile(_Window(buffer, start, end)) as archive:
                infos = archive.infolist()
        except ZIP_ERRORS as error:
            raise self.error("a damaged archive") from error
        self.records = self._records(infos)
        found = [name for name in self.records if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(found) != 1:
            raise self.error("an archive, but not one of torch.save (no data.pkl in it)")
        self.folder = found[0].removesuffix("data.pkl")
        order = self.records.get(f"{self.folder}byteorder")
        if order is not None and self._bytes(*order[:2]) != b"little":
            raise UnsupportedError("written on a big-endian machine", path=buffer.path, remedy="Save it again on a little-endian machine.")

    def error(self, message: str, where: str | None = None) -> CorruptFileError:
        return CorruptFileError(message, path=self.buffer.path, field=where)

    def pickle(self) -> bytes:
        start, size, checksum = self.records[f"{self.folder}data.pkl"]
        data = self._bytes(start, size)
        if checksum and zlib.crc32(data) != checksum:
            raise self.error("damaged: its checksum does not match", "data.pkl")
        return data

    def storage(self, key: str, size: int) -> torch.Tensor:
        """The bytes of a storage, which must be as many as the pickle says."""
        start, stored, checksum = self.records.get(f"{self.folder}data/{key}", (0, -1, 0))
        if stored != size:
            raise self.error(f"a storage of {size} bytes, its record has {max(stored, 0)}", f"data/{key}"[:200])
        if key not in self.flat:
            flat = self.buffer.tensor(start, torch.uint8, (size,), size)
            # Elsewhere than where torch.save puts it: the lengths in the record's header may be off.
            if checksum and (self.checksums or (start - self.start) % _ALIGNMENT) and zlib.crc32(flat.numpy().data) != checksum:
                raise self.error("damaged: its checksum does not match", f"data/{key}")
            self.flat[key] = flat.clone() if self.private or start % 16 else flat
        return self.flat[key]

    def _bytes(self, start: int, size: int) -> bytes:
        return bytes(self.buffer.data[start : start + size])

    def _records(self, infos: list[zipfile.ZipInfo]) -> dict[str, tuple[int, int, int]]:
        """Name -> start in the file, size and checksum (0: torch.save was told to write none)."""
        records: dict[str, tuple[int, int, int]] = {}
        before = self.start
        for info in sorted(infos, key=lambda info: info.header_offset):
            header = self.start + info.header_offset
            if header < before or header + 30 > self.end or self._bytes(header, 4) != MAGIC:
                raise self.error("records that overlap or lie outside the archive", info.filename[:200])
            name_size, extra = struct.unpack("<HH", self._bytes(header + 26, 4))
            start = header + 30 + name_size + extra
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise self.error("compressed records, which torch.save never writes", info.filename[:200])
            name = self._bytes(header + 30, name_size).decode("utf-8" if info.flag_bits & 0x800 else "cp437", "replace")
            if start + info.file_size > self.end or name != info.orig_filename:
                raise self.error("a record whose header is not what the archive's directory says", info.filename[:200])
            if info.filename in records:
                raise self.error("a record occurs twice", info.filename[:200])
            records[info.filename] = start, info.file_size, info.CRC
            before = start + info.file_size
        return records


class _Window(io.RawIOBase):
    """A range of a buffer as a file, for `zipfile`."""

    def __init__(self, buffer: FileBuffer, start: int, end: int) -> None:
        super().__init__()
        self._data, self._start, self._size, self._at = buffer.data, start, end - start, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if position < 0:
            raise ValueError("negative seek position")
        self._at = position
        return position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        count = left if size is None or size < 0 else min(size, left)
        position = self._start + self._at
        self._at += count
        return bytes(self._data[position : position + count])


def _legacy(buffer: FileBuffer) -> Any:
    """The stream of `torch.save` before 1.6: magic number, version, system, content, keys of the storages, then each storage with its
    number of elements before it."""
    parts: list[Any] = []
    references: list[pickled.Reference] = []
    position = 0
    for _ in range(5):
        part, position = pickled.read(buffer.data, KNOWN, position, references)
        parts.append(part)
        if parts[0] != _LEGACY_MAGIC:
            raise pickled.PickleError("not the header of torch.save's old format")
    _, _, system, content, keys = parts
    if isinstance(system, pickled.Pairs) and any(key == "little_endian" and value is False for key, value in system):
        raise UnsupportedError("written on a big-endian machine", path=buffer.path, remedy="Save it again on a little-endian machine.")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise pickled.PickleError("no list of storages")
    widths = {key: dtype.itemsize if dtype else 0 for key, dtype, _ in map(storage_identity, references)}
    records: dict[str, tuple[int, int]] = {}
    end_of_pickles = position
    for key in keys:
        size = int.from_bytes(bytes(buffer.data[position : position + 8]), "little") * widths.get(key, 0)
        position += 8
        if key in records or not widths.get(key) or size > buffer.size - position:
            raise pickled.PickleError("storages that the file does not hold")
        records[key] = position, size
        position += size
    flat: dict[str, torch.Tensor] = {}

    def storage(key: str, size: int) -> torch.Tensor:
        start, stored = records.get(key, (0, -1))
        if stored != size:
            raise CorruptFileError(f"a storage of {size} bytes, the file has {max(stored, 0)}", path=buffer.path)
        if key not in flat:
            found = buffer.tensor(start, torch.uint8, (size,), size)
            flat[key] = found.clone() if start % 16 else found
        return flat[key]

    return Objects(storage, buffer.path, end_of_pickles).plain(content)
