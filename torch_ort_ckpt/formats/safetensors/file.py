"""One safetensors file: its header read and checked by the `safetensors` package, tensors that alias the file, a stream on the way out.

The package also maps files privately and slices them; tensors are mapped here so that a pass over a large file can give pages back
(`FileBuffer.release`). The package writes a file from tensors that are all in memory; the writer here streams with bounded memory, reports
progress, and fills in an identity after the data.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from ...checkpoint.state import nbytes
from ...dtypes import short_name
from ...errors import CheckpointError, CorruptFileError, UnsupportedError
from ...storage.buffers import FileBuffer, open_file
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
        metadata, entries = read_header(path)
        sizes = {}
        for name, (kind, shape) in entries.items():
            if kind not in DTYPES:
                raise UnsupportedError(f"element type {kind!r}", path=path, field=name)
            try:
                sizes[name] = element_count(shape)
            except ValueError as error:
                raise CorruptFileError(f"impossible shape ({error})", path=path, field=name) from error
        position = buffer.size - sum(count * DTYPES[entries[name][0]].itemsize for name, count in sizes.items())
        if buffer.replaced():  # header and data are opened one after the other
            raise CheckpointError("replaced while it was being read", path=path, remedy="Load it again.")
        tensors = {}
        for name, (kind, shape) in entries.items():
            tensors[name] = buffer.tensor(position, DTYPES[kind], shape, sizes[name])
            position += sizes[name] * DTYPES[kind].itemsize
        return tensors, metadata, buffer


def read_header(path: Path) -> tuple[dict[str, str], dict[str, tuple[str, tuple[int, ...]]]]:
    """(metadata, element type and shape by name, in the order of the data). The package has checked that the tensors lie one behind
    another and end where the file ends."""
    open_file(os.fspath(path)).close()  # with our errors, and without waiting for a FIFO's writer
    with safe_open(path, "pt", backend="pread") as file:  # works where the file system can't map files
        parts = {name: file.get_slice(name) for name in file.offset_keys()}
        return file.metadata() or {}, {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}


def identity_of(path: Path) -> str | None:
    """The identity of the set this file or index belongs to."""
    with reported(path):
        if path.name.lower().endswith(".safetensors") or not _is_index(path):
            return read_header(path)[0].get(IDENTITY_KEY)
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
    """A JSON object without repeated names."""

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
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise CorruptFileError(f"malformed header ({reason})", path=path) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError, OverflowError) as error:
        raise CorruptFileError(f"malformed header ({type(error).__name__}: {error})", path=path) from error
