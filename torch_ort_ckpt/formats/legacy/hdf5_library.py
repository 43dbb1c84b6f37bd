"""HDF5 through h5py: files in the newer, checksummed layout are read with it, and all files are written with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...checkpoint.state import Value
from ...errors import CorruptFileError, MissingDependencyError, UnsupportedError
from ...storage.buffers import FileBuffer
from ...storage.files import string_array
from ...storage.paths import PathLike
from .hdf5 import MAX_DEPTH, REPACK, Claims, Tree


def h5py_module(path: PathLike) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise MissingDependencyError("h5py is needed for this file", path=path, remedy='pip install "torch-ort-ckpt[legacy]"') from error
    return h5py


def read_new_tree(buffer: FileBuffer) -> Tree:
    """Everything in the file. Tensors alias `buffer`."""
    h5py = h5py_module(buffer.path)
    reader = _Reader(buffer, h5py)
    try:
        with h5py.File(buffer.path, "r") as file:
            return reader.group(file, "", 0)
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, UnicodeDecodeError, OverflowError) as error:
        if isinstance(error, (CorruptFileError, UnsupportedError)):
            raise
        raise CorruptFileError(f"HDF5 can't read it ({str(error).splitlines()[0] if str(error) else error!r})", path=buffer.path) from error


class _Reader:
    def __init__(self, buffer: FileBuffer, h5py: Any) -> None:
        self.buffer, self.h5py = buffer, h5py
        self.visited: set[Any] = set()
        self.claims = Claims(buffer)
        self.text = 0

    def refuse(self, message: str, where: str, remedy: str | None = None) -> UnsupportedError:
        return UnsupportedError(message, path=self.buffer.path, field=where or "/", remedy=remedy)

    def group(self, group: Any, where: str, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise self.refuse(f"nested deeper than {MAX_DEPTH}", where)
        tree: Tree = {}
        for name in group:
            place = f"{where}/{name}" if where else name
            if not isinstance(group.get(name, getlink=True), self.h5py.HardLink):
                raise self.refuse("a link that may lead to another file", place)
            item = group[name]
            identity = self.h5py.h5o.get_info(item.id).addr
            if identity in self.visited:
                raise self.refuse("an object that is linked twice", place)
            self.visited.add(identity)
            if isinstance(item, self.h5py.Group):
                tree[name] = self.group(item, place, depth + 1)
            elif isinstance(item, self.h5py.Dataset):
                tree[name] = self.dataset(item, place)
            else:
                raise self.refuse("neither a group nor a dataset", place)
        return tree

    def strings(self, item: Any, where: str) -> list[str]:
        """One at a time: elements may share their text, and text of a fixed length that was never written takes no place in the file."""
        if item.size * max(16 if item.dtype.kind == "O" else item.dtype.itemsize, 1) > self.buffer.size:
            raise self.refuse("strings longer than the file", where)
        texts = []
        for position in np.ndindex(item.shape):
            text = bytes(item[position])
            self.text += len(text)
            if self.text > 4 * self.buffer.size:
                raise self.refuse("more text than the file holds", where)
            texts.append(text.decode("utf-8", "surrogateescape"))
        return texts

    def dataset(self, item: Any, where: str) -> Value:
        plan, h5d = item.id.get_create_plist(), self.h5py.h5d
        if plan.get_layout() == h5d.VIRTUAL:
            raise self.refuse("a virtual dataset, whose data is in other files", where)
        if plan.get_external_count():
            raise self.refuse("its data is in external files", where)
        if plan.get_layout() not in (h5d.CONTIGUOUS, h5d.COMPACT) or plan.get_nfilters():
            raise self.refuse("chunked or compressed data", where, REPACK)
        shape, dtype = item.shape, item.dtype
        if shape is None:
            raise self.refuse("an empty dataset without a shape", where)
        if self.h5py.check_string_dtype(dtype) is not None:
            return string_array(self.strings(item, where), shape)
        try:
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
        except (TypeError, ValueError) as error:
            raise self.refuse(f"an element type that checkpoints do not have ({dtype})", where) from error
        size = item.size * dtype.itemsize
        start = item.id.get_offset()
        if not size:
            return torch.empty(shape, dtype=kind)
        if plan.get_layout() == h5d.COMPACT:
            if size > self.buffer.size:
                raise self.refuse("more data than the file", where)
            return torch.from_numpy(np.array(item[()], dtype=dtype, ndmin=0).reshape(shape))
        if start is None or start + size > self.buffer.size:
            raise CorruptFileError(f"needs {size} bytes that are not in the file", path=self.buffer.path, field=where)
        self.claims.add(start, size, where)
        return self.buffer.tensor(start, kind, shape, item.size)
