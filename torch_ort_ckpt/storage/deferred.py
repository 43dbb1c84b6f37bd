"""Files for libraries that handle write errors badly: HDF5 crashes the process, PyTorch's zip writer hides the reason."""

from __future__ import annotations

import os
from typing import Any, BinaryIO

from .files import Progress


class DeferredErrors:
    """A file whose writes always seem to succeed. The first error is kept, and `check` raises it.

    After that, nothing is written to disk. Small writes, such as a library's own bookkeeping, are kept in memory, so that the library
    reads back what it wrote.
    """

    def __init__(self, file: BinaryIO, progress: Progress | None = None) -> None:
        self._file, self._progress = file, progress
        self._position = self._end = self._reached = 0  # our position, our size, the underlying file's position
        self._after: list[tuple[int, bytes]] = []
        self.error: OSError | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def write(self, data: Any) -> int:
        start, size = self._position, memoryview(data).nbytes
        if self.error is None:
            try:
                if start != self._reached:
                    self._file.seek(start)
                self._file.write(data)
                self._reached = start + size
            except OSError as error:
                self.error = error
        if self.error is not None and size <= _SMALL:
            self._after.append((start, bytes(data)))
        self._position += size
        self._end = max(self._end, self._position)
        if self._progress and self.error is None:
            self._progress(size)
        return size

    def readinto(self, buffer: Any) -> int:
        """The bytes written there, with zeros in the gaps."""
        view = memoryview(buffer).cast("B")
        start, size, done, self._reached = self._position, len(view), 0, -1
        try:
            self._file.seek(start)
            while count := self._file.readinto(view[done:]):  # type: ignore[attr-defined]
                done += count
        except OSError as error:
            self.error = self.error or error
        view[done:] = bytes(size - done)
        for position, data in self._after:
            first, last = max(position, start), min(position + len(data), start + size)
            if first < last:
                view[first - start : last - start] = data[first - position : last - position]
        self._position += size
        return size

    def read(self, size: int) -> bytes:
        data = bytearray(size)
        self.readinto(data)
        return bytes(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def truncate(self, size: int) -> int:
        self._end = size
        if self.error is None:
            try:
                self._file.truncate(size)
            except OSError as error:
                self.error = error
        return size

    def flush(self) -> None:
        """Nothing is buffered."""


_SMALL = 1 << 20
