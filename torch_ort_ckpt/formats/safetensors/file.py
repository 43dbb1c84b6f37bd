"""One safetensors file: header, checks and aliasing tensors on the way in, a stream on the way out.

Written here rather than with the `safetensors` package for what that does not do: tensors that alias a private mapping, streaming with
bounded memory, and an identity filled in after the data. The tests compare it with the package in both directions.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ...checkpoint.state import nbytes
from ...dtypes import short_name
from ...errors import CheckpointError, CorruptFileError, UnsupportedError
from ...storage.buffers import FileBuffer
from ...storage.files import ALIGNMENT, Progress, padding, write_tensor
from ...storage.filesets import IDENTITY_LENGTH, Fingerprint
from ...storage.paths import PathLike
from ..shapes import element_count

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # the limit of the reference implementation
IDENTITY_KEY = "torch_ort_ckpt.set"
_PLACEHOLDER = "-" * IDENTITY_LENGTH


def read_file(path: Path, mmap: bool) -> tuple[dict[str, torch.Tensor], dict[str, str], FileBuffer]:
    """(tensors, metadata, the buffer they alias)."""
    with reported(path):
        buffer = FileBuffer(path, mmap=mmap)
        header, start = _header(buffer, path)
        metadata = _metadata(header, path)
        tensors, end = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
            first, last = entry["data_offsets"]
            dtype, shape = DTYPES.get(entry["dtype"]), tuple(entry["shape"])
            if dtype is None:
                raise UnsupportedError(f"element type {entry['dtype']!r}", path=path, field=name)
            try:
                count = element_count(shape)
            except ValueError as error:
                raise CorruptFileError(f"impossible shape ({error})", path=path, field=name) from error
            if first != end or last - first != count * dtype.itemsize or start + last > buffer.size:
                raise CorruptFileError("its bytes leave a gap, overlap or lie outside the file", path=path, field=name)
            end = last
            tensors[name] = buffer.tensor(start + first, dtype, shape, count)
        if start + end != buffer.size:
            raise CorruptFileError(f"{buffer.size - start - end} bytes after the last tensor", path=path)
        return tensors, metadata, buffer


def identity_of(path: Path) -> str | None:
    """The identity of the set this file or index belongs to."""
    with reported(path):
        if path.name.endswith(".safetensors") or not _is_index(path):
            header, _ = _header(FileBuffer(path), path)
            return _metadata(header, path).get(IDENTITY_KEY)
        found = parse_json(bytes(FileBuffer(path, mmap=False).data)).get("metadata", {}).get(IDENTITY_KEY)
        return str(found) if found is not None else None


def _is_index(path: Path) -> bool:
    return ".safetensors.index.json" in path.name


def write_file(
    file: BinaryIO,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    path: PathLike,
    progress: Progress | None = None,
    fingerprint: Fingerprint | None = None,
) -> int:
    """Stream a file; with a `fingerprint` the header holds a placeholder, and its position is returned for `write_identity`."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # so that every tensor is aligned
    header: dict[str, Any] = {"__metadata__": {**metadata, **({IDENTITY_KEY: _PLACEHOLDER} if fingerprint else {})}}
    if "__metadata__" in tensors:
        raise UnsupportedError("this name is reserved by the format", path=path, field="__metadata__", remedy="Rename the tensor.")
    end = 0
    for name, value in ordered:
        if value.dtype not in _NAMES or value.is_meta:
            what = "has no data (a meta tensor)" if value.is_meta else f"safetensors has no element type {short_name(value.dtype)}"
            raise UnsupportedError(what, path=path, field=name)
        size = nbytes(value)
        header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [end, end + size]}
        end += size
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError("a name that is not Unicode text", path=path) from error
    if len(text) + ALIGNMENT > _MAX_HEADER:
        raise UnsupportedError("names and metadata beyond 100 MB, the limit of the format", path=path)
    text += b" " * padding(8 + len(text))
    file.write(len(text).to_bytes(8, "little") + text)
    if fingerprint:
        fingerprint.head(text)
    for _, value in ordered:
        write_tensor(file, value, progress)
        if fingerprint:
            fingerprint.update(value)
    return 8 + text.find(_PLACEHOLDER.encode(), text.find(f'"{IDENTITY_KEY}":'.encode())) if fingerprint else 0


def write_identity(file: BinaryIO, position: int, identity: str) -> None:
    file.seek(position)
    file.write(identity.encode())


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object without repeated names (the reference implementation refuses them too)."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name occurs twice")
        return found

    content = json.loads(text, object_pairs_hook=unique)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


@contextlib.contextmanager
def reported(path: PathLike) -> Iterator[None]:
    """Convert Python's exceptions for malformed content to our error."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError, OverflowError) as error:
        raise CorruptFileError(f"malformed header ({type(error).__name__}: {error})", path=path) from error


def _header(buffer: FileBuffer, path: PathLike) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(bytes(buffer.data[:8]), "little")
    if buffer.size < 8 or length > min(_MAX_HEADER, buffer.size - 8):
        raise CorruptFileError("header longer than the file", path=path, remedy="The file is cut short or not safetensors.")
    return parse_json(bytes(buffer.data[8 : 8 + length])), 8 + length


def _metadata(header: dict[str, Any], path: PathLike) -> dict[str, str]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptFileError("must map strings to strings", path=path, field="__metadata__")
    return metadata
