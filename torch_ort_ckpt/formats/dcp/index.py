"""The index of a DCP folder, `.metadata`: which tensors there are, in which chunks, and the file and offset of each chunk.

It is a pickle of DCP's own classes. It is read as data (see `pickled`): no class of PyTorch, or of anyone else, is reachable from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError, CorruptFileError, UnsupportedError
from ...storage.buffers import FileBuffer
from ..shapes import element_count
from ..torch import pickled
from ..torch.objects import DTYPES
from ..torch.pickled import Call, Known, Name, Pairs

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # where TensorProperties was until PyTorch 2.3
_TENSOR, _BYTES = f"{_METADATA}.TensorStorageMetadata", f"{_METADATA}.BytesStorageMetadata"

KNOWN: Known = {
    _METADATA: frozenset(
        {"Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex"}
        | {"StorageMeta", "_MEM_FORMAT_ENCODING"}
    ),
    _FILESYSTEM: frozenset({"_StorageInfo", "_StoragePrefix"}),
    _SHARDED: frozenset({"TensorProperties", "MEM_FORMAT_ENCODING"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size", "device", *DTYPES}),
    "collections": frozenset({"OrderedDict"}),
    "builtins": frozenset({"getattr", "set", "frozenset"}),  # Python 3.11.0 to 3.11.3 write the members of an Enum with getattr
    "pathlib": frozenset({"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}),
    "pathlib._local": frozenset({"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}),
}
"""What PyTorch 2.0 to 2.13 put into an index."""


@dataclass(frozen=True)
class Place:
    """Bytes of one of the folder's files: an archive of `torch.save`."""

    file: str
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its data is (None for an empty one)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place | None


@dataclass(frozen=True)
class Entry:
    """One tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        return element_count(self.shape) * self.dtype.itemsize


@dataclass
class Index:
    """The tensors by name, and the names of what is not a tensor."""

    tensors: dict[str, Entry] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def read_index(path: Path) -> Index:
    data = bytes(FileBuffer(path, mmap=False).data)
    try:
        return _index(pickled.read(data, KNOWN)[0], path)
    except pickled.UnknownNameError as error:
        raise UnsupportedError(
            f"its index refers to {error.name}, which DCP does not write", path=path, remedy="This library runs no code from files."
        ) from error
    except CheckpointError as error:
        error.path = str(path)
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptFileError(f"not DCP's index ({type(error).__name__}: {error})", path=path) from error


def _index(content: Any, path: Path) -> Index:
    fields = _fields(content, f"{_METADATA}.Metadata")
    places = _places(fields["storage_data"])
    index = Index()
    for name, entry in _pairs(fields["state_dict_metadata"]):
        if not isinstance(name, str) or name in index.tensors:
            raise CorruptFileError("a name that is not text, or occurs twice", path=path)
        if isinstance(entry, Call) and entry.function == _BYTES:
            index.others.append(name)
            continue
        try:
            index.tensors[name] = _entry(name, entry, places)
        except CheckpointError as error:
            error.field = name
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptFileError(f"not DCP's description of a tensor ({error})", path=path, field=name) from error
    return index


def _entry(name: str, content: Any, places: Mapping[str, Place]) -> Entry:
    fields = _fields(content, _TENSOR)
    dtype = _dtype(fields["properties"])
    shape = _sizes(fields["size"])
    count = element_count(shape)
    chunks = []
    for item in _list(fields["chunks"]):
        parts = _fields(item, f"{_METADATA}.ChunkStorageMetadata")
        offsets, sizes = _sizes(parts["offsets"]), _sizes(parts["sizes"])
        empty = not element_count(sizes)
        place = places.get(_key(name, offsets))
        if place is None and not empty:
            raise ValueError("a chunk that is in no file")
        chunks.append(Chunk(offsets, sizes, None if empty else place))
    if count and not chunks:
        raise ValueError("no chunk of it is in any file")
    return Entry(dtype, shape, tuple(chunks))


def _key(name: str, offsets: tuple[int, ...]) -> str:
    """Name and offset of a chunk. As text: the hashes of tuples of integers can be made to collide."""
    return f"{offsets} {name}"


def _places(content: Any) -> dict[str, Place]:
    """Where each chunk is."""
    places: dict[str, Place] = {}
    for key, value in _pairs(content):
        which, where = _fields(key, f"{_METADATA}.MetadataIndex"), _fields(value, f"{_FILESYSTEM}._StorageInfo")
        name, file, start, length = which["fqn"], where["relative_path"], where["offset"], where["length"]
        offset = which.get("offset")
        if not isinstance(name, str) or not isinstance(file, str):
            raise ValueError("a name that is not text")
        if file != Path(file).name or "\\" in file or "\0" in file or file in ("", ".", ".."):
            raise CorruptFileError("refers to a file outside the folder", field=file)
        if type(start) is not int or type(length) is not int or not 0 <= start < 1 << 63 or not 0 <= length < 1 << 63:
            raise ValueError("not a byte position")
        if where.get("transform_descriptors"):
            raise UnsupportedError(
                "its data went through an extension of DCP, such as compression", field=name, remedy="Save it without extensions."
            )
        places[_key(name, () if offset is None else _sizes(offset))] = Place(file, start, start + length)
    return places


def _dtype(content: Any) -> torch.dtype:
    kind = content.function if isinstance(content, Call) else ""
    if kind not in (f"{_METADATA}.TensorProperties", f"{_SHARDED}.TensorProperties"):
        raise ValueError("no properties")
    state = content.state
    dtype, layout = state[:2] if isinstance(state, tuple) and len(state) >= 2 else (None, None)
    if not isinstance(dtype, Name) or not dtype.full.startswith("torch.") or dtype.full.removeprefix("torch.") not in DTYPES:
        raise ValueError("an element type that PyTorch does not have")
    if not isinstance(layout, Call) or layout.arguments != ("torch.strided",):
        raise UnsupportedError("not an ordinary, dense tensor", remedy="Save it as .to_dense().")
    return DTYPES[dtype.full.removeprefix("torch.")]


def _sizes(content: Any) -> tuple[int, ...]:
    if isinstance(content, Call) and content.function == "torch.Size":
        content = content.arguments[0] if len(content.arguments) == 1 else ()
    if not isinstance(content, (tuple, list)):
        raise ValueError("expected a shape")
    element_count(content)
    return tuple(content)


def _fields(content: Any, kind: str) -> dict[str, Any]:
    """The attributes of one of DCP's objects."""
    if not isinstance(content, Call) or content.function != kind or content.arguments:
        raise ValueError(f"expected a {kind.rpartition('.')[2]}")
    return dict(_pairs(content.state, str))


def _pairs(content: Any, *keys: type) -> Pairs:
    if isinstance(content, Call) and content.function == "collections.OrderedDict" and isinstance(content.content, Pairs):
        content = content.content
    if not isinstance(content, Pairs) or (keys and not all(isinstance(key, keys) for key, _ in content)):
        raise ValueError("expected a dictionary")
    return content


def _list(content: Any) -> list[Any]:
    if not isinstance(content, list) or isinstance(content, Pairs):
        raise ValueError("expected a list")
    return content
