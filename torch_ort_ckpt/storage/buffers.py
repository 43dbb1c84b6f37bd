"""A file's bytes, mapped or read at once, that tensors alias."""

from __future__ import annotations

import contextlib
import mmap as _mmap
import os
import stat
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch

from ..errors import CheckpointError, CorruptFileError, MissingFileError
from .paths import PathLike
from .system import is_windows


class FileBuffer:
    """One file's bytes, mapped copy-on-write (`mmap=True`) or read at once.

    A mapped file is read on first access, writes to a tensor never reach the file, and the mapping survives a rename or delete.
    Windows would refuse to replace or delete it as long as it is mapped, so there the file is read instead, unless the buffer is only
    looked into and not `kept`.
    """

    def __init__(self, path: PathLike, *, mmap: bool = True, kept: bool = True) -> None:
        self.path = os.fspath(path)
        if sys.byteorder != "little":
            raise CheckpointError("checkpoints are little-endian and this machine is not", path=self.path)
        with open_file(self.path) as file:
            self.origin = os.fstat(file.fileno())
            self.size = self.origin.st_size
            self._map: _mmap.mmap | None = None
            self.data: Any = bytearray()
            refused: Exception | None = None
            if mmap and self.size and not (kept and is_windows()):
                try:
                    self._map = self.data = _mmap.mmap(file.fileno(), self.size, access=_mmap.ACCESS_COPY)
                except (OSError, ValueError) as error:  # some network file systems don't support mmap: read instead
                    refused = error
            if self._map is None:
                self.data = _read_all(file, self.size, self.path, mapped=mmap, refused=refused)
                self.size = len(self.data)

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...], count: int) -> torch.Tensor:
        """A tensor over the bytes at `offset`; the caller has checked the range. Misaligned data is copied."""
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if offset % dtype.itemsize:
            source = torch.frombuffer(self.data, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
            return source.clone().view(dtype).reshape(shape)
        flat = torch.frombuffer(self.data, dtype=dtype, count=count, offset=offset)
        return flat if len(shape) == 1 else flat.reshape(shape)

    def replaced(self) -> bool:
        """Whether the file at the path was replaced or modified since it was opened here."""
        try:
            now = os.stat(self.path)
        except OSError:
            return True
        return not _same_file(now, self.origin)

    def close(self) -> None:
        """Unmap a file that was only looked into: an error that is still handled would keep it mapped. Without effect while tensors
        alias it."""
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()

    def release(self) -> None:
        """Let the kernel drop the pages read so far. Only for mappings that were never written to: changes would be lost."""
        if self._map is not None and hasattr(_mmap, "MADV_DONTNEED"):
            self._map.madvise(_mmap.MADV_DONTNEED)


def read_range(path: str, offset: int, size: int, origin: os.stat_result) -> bytearray:
    """Bytes of a file that must still be the one of `origin`."""
    with open_file(path) as file:
        if not _same_file(os.fstat(file.fileno()), origin):
            raise CheckpointError("changed while it was being read", path=path, remedy="Run it again when nothing writes to the file.")
        file.seek(offset)
        return _read_all(file, size, path, mapped=True, refused=None)


def open_file(path: str) -> BinaryIO:
    """Open for reading, with our errors; refuses what is not a regular file (a FIFO would hang)."""
    with opening(path, "file"):
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return os.fdopen(descriptor, "rb", buffering=0)


def _not_regular(path: Any) -> CheckpointError:
    return CheckpointError("not a regular file", path=path, remedy="Copy its content to a file first.")


@contextlib.contextmanager
def opening(path: Any, what: str) -> Iterator[None]:
    """The system's error for a path that can't be opened, as our error type; `what` was expected there."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFileError(f"no such {what}", path=path) from error
    except (OSError, ValueError) as error:
        if what == "file" and isinstance(error, PermissionError) and os.path.isdir(path):  # Windows opens no folders
            raise _not_regular(path) from error
        raise CheckpointError(
            f"can't be opened ({getattr(error, 'strerror', None) or error})", path=path, remedy="Check the path and its permissions."
        ) from error


@contextlib.contextmanager
def readable(path: Any) -> Iterator[None]:
    """The system's error for a file or folder that can't be accessed, as our error type."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"can't be read ({error.strerror or error})",
            path=error.filename if isinstance(error.filename, str) else path,
            remedy="Check the path and its permissions.",
        ) from error


def _same_file(a: os.stat_result, b: os.stat_result) -> bool:
    return all(getattr(a, key) == getattr(b, key) for key in ("st_dev", "st_ino", "st_size", "st_mtime_ns"))


def _read_all(file: BinaryIO, size: int, path: str, *, mapped: bool, refused: Exception | None) -> bytearray:
    try:
        data = bytearray(size)
    except MemoryError as error:
        why = f", and it can't be mapped ({getattr(refused, 'strerror', None) or refused})" if refused is not None else ""
        remedy = "Close other programs, or enlarge the swap space or paging file (with ulimit -v: the limit)."
        if not mapped and not is_windows():
            remedy = "Load it with mmap=True."
        raise CheckpointError(f"{size} bytes do not fit in memory{why}", path=path, remedy=remedy) from error
    view, done = memoryview(data), 0
    try:
        while done < size:
            got = file.readinto(view[done:])  # type: ignore[attr-defined]
            if not got:
                raise CorruptFileError(f"ended at {done} of {size} bytes while being read", path=path)
            done += got
    except OSError as error:
        raise CheckpointError(f"can't be read ({error.strerror})", path=path, remedy="Check the medium, and read it again.") from error
    return data
