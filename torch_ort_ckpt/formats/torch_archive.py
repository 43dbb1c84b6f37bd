"""Is a `torch.save` archive safe to map?

`torch.load(mmap=True)` believes the sizes in the pickle without comparing them with the records; a damaged file would alias other bytes
than its own. So the pickle is walked first, executing nothing: only if every storage it names is a record of exactly that size is the file
mapped. Anything else is read without mapping, where torch checks for itself.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

from ..errors import CorruptFileError

_ELEMENT_SIZES = {"UntypedStorage": 1} | {
    f"{name}Storage": dtype.itemsize
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}
_MARK = object()
_ALIGNMENT = 64  # torch.save's


def can_be_mapped(path: Path) -> bool:
    """Whether every storage in the archive's pickle is a stored record of the size the pickle says."""
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise CorruptFileError("compressed records, which torch.save never writes", path=path)
            for info in archive.infolist():
                archive.open(info).close()  # compares the record's own header with the directory's
                if _data_start(archive, info) % _ALIGNMENT and info.file_size and "/data/" in info.filename:
                    return False  # not where torch.save puts it: the header's lengths are off
            pickled = next(name for name in sizes if name.endswith("/data.pkl"))
            storages = _storages(archive.read(pickled))
    except (zipfile.BadZipFile, StopIteration, OSError, NotImplementedError, RuntimeError, struct.error, _Unexpected):
        return False
    folder = pickled.removesuffix("data.pkl")
    return all(sizes.get(f"{folder}data/{key}") == size for key, size in storages)


def _data_start(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """Where a record's bytes begin: after its header, whose last two words are the lengths of the name and of the padding."""
    file: Any = archive.fp
    file.seek(info.header_offset + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    return int(info.header_offset + 30 + name + extra)


class _Unexpected(Exception):
    """The pickle is not of the form `torch.save` writes."""


def _storages(data: bytes) -> list[tuple[str, int]]:
    """Key and size in bytes of every storage a pickle refers to, from a walk over its opcodes."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    found = []
    try:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "BINPERSID":
                found.append(_storage(stack.pop()))
                stack.append(None)
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name == "MARK":
                stack.append(_MARK)
            elif name == "TUPLE":
                stack.append(tuple(_pop_to_mark(stack)))
            elif name == "PERSID":
                raise _Unexpected
            else:
                _apply(opcode, argument, stack)
    except (ValueError, IndexError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise _Unexpected from error
    return found


def _apply(opcode: Any, argument: Any, stack: list[Any]) -> None:
    """The effect of any other opcode on the stack: what it pushes is its argument, or nothing known."""
    before = opcode.stack_before
    if pickletools.markobject in before:
        _pop_to_mark(stack)
        before = before[: before.index(pickletools.markobject)]
    for _ in before:
        stack.pop()
    stack.extend(argument if not before else None for _ in opcode.stack_after)


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    items = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _storage(identity: Any) -> tuple[str, int]:
    """`("storage", "torch FloatStorage", key, location, elements)`."""
    if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
        raise _Unexpected
    _, kind, key, _, count = identity
    if not isinstance(kind, str) or not isinstance(key, str) or type(count) is not int or count < 0:
        raise _Unexpected
    size = _ELEMENT_SIZES.get(kind.rpartition(" ")[2])
    if size is None:
        raise _Unexpected
    return key, count * size
