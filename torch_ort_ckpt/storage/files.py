"""Files that are written: through one class that writes everything or raises, and atomically."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import mmap as _mmap
import os
import re
import secrets
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, cast

import numpy as np
import torch

from ..errors import CheckpointError, CheckpointWarning, MissingFileError, printable
from .locks import Lock, directory_lock, lock
from .paths import PathLike, as_path
from .read_back import PIECE, active_reader
from .system import is_windows, patiently, sync
from .tensors import byte_view

Progress = Callable[[int], None]
"""Called with the number of bytes just written."""

ALIGNMENT = 64
"""Where tensor data starts in files we write: a cache line, and enough for every element type."""


class OutputFile(io.RawIOBase):
    """An open, unbuffered file. `write` writes everything or raises: the system call may write less than requested, for example
    when the disk is full. Every file of this library is written through it."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def write(self, data: Any) -> int:
        view = memoryview(data)
        view = view.cast("B") if view.nbytes and view.c_contiguous else memoryview(view.tobytes())
        done = 0
        while done < len(view):
            written = os.write(self._descriptor, view[done:])
            if written <= 0:
                raise OSError(errno.EIO, "the system wrote 0 bytes")
            done += written
        return done

    def readinto(self, buffer: Any) -> int:
        data = os.read(self._descriptor, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return os.lseek(self._descriptor, offset, whence)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        os.ftruncate(self._descriptor, size)
        return size

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """Some network file systems report a failed write only here."""
        if not self.closed:
            super().close()
            os.close(self._descriptor)


def create_file(path: PathLike) -> BinaryIO:
    """Create a file for writing and reading. The path must not exist."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return cast(BinaryIO, OutputFile(os.open(path, flags, 0o666)))


def tensor_bytes(value: torch.Tensor) -> memoryview:
    """The tensor's elements as bytes, without a copy for contiguous CPU tensors."""
    return byte_view(value.cpu() if value.device.type != "cpu" else value).numpy().data


def write_tensor(file: BinaryIO, value: torch.Tensor, progress: Progress | None = None) -> int:
    """Stream one tensor's bytes into the file; returns how many."""
    if value.numel() == 0:
        return 0
    view = tensor_bytes(value)
    size = len(view)
    map_pages(value)
    reader = active_reader() if isinstance(file, OutputFile) else None
    step = _CHUNK if reader is None else PIECE
    for start in range(0, size, step):
        chunk = view[start : start + step]
        written = file.write(chunk)
        if progress:
            progress(written)
        if reader:
            reader.check(file, chunk)
    if reader:
        reader.add(value)
    return size


_CHUNK = 64 << 20
_MADV_POPULATE_READ = 22  # Linux 5.14; older kernels return an error, which is ignored


def map_pages(value: torch.Tensor) -> None:
    """Populate all pages of a tensor that aliases a file at once: with one page fault per page, reading takes a third longer."""
    size = value.numel() * value.element_size()
    if sys.platform == "linux" and size >= 1 << 20 and value.device.type == "cpu" and value.is_contiguous():
        address = value.data_ptr()
        start = address & ~(_mmap.PAGESIZE - 1)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), _MADV_POPULATE_READ)


@contextlib.contextmanager
def atomic_write(path: PathLike, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that replaces `path` in one rename when the block succeeds, and is deleted when it raises.

    With `durable`, the bytes and the rename are on the medium before this returns.
    """
    with pending_file(path) as pending:
        yield pending.file
        pending.finish(durable)
        pending.commit(durable)


class PendingFile:
    """A finished or unfinished temporary beside its target; `commit` is the rename."""

    def __init__(self, path: PathLike) -> None:
        self.target = Path(os.path.realpath(as_path(path)))  # follow symbolic links, as an in-place write would
        self.committed = False
        self._mark: int | None = None
        if is_windows() and _is_read_only(self.target):  # it can't be replaced there: say so before gigabytes are written
            raise PermissionError(errno.EACCES, "the file is read-only")
        while self._mark is None:
            self.temporary = self.target.with_name(f".{self.target.name}.{secrets.token_hex(4)}.tmp")
            self.file = create_file(self.temporary)
            self._mark = self._marked()
        with contextlib.suppress(OSError):  # keep the mode of the replaced file
            os.chmod(self.temporary, stat.S_IMODE(self.target.stat().st_mode))

    def _marked(self) -> int | None:
        try:
            mark = _mark_as_alive(self.file.fileno())
        except OSError:
            self.discard()
            raise
        if mark is None:
            self.file.close()
        return mark

    def finish(self, durable: bool) -> None:
        if durable:
            sync(self.file.fileno())
        if not is_windows():  # there the lock ends with the file, which stays open until the rename
            self.file.close()

    def commit(self, durable: bool, target: Path | None = None) -> None:
        # Windows renames no open file. Without its lock the temporary looks abandoned, but only who locks the folder may delete it.
        with directory_lock(self.target.parent) if is_windows() else contextlib.nullcontext():
            self.file.close()
            patiently(os.replace, self.temporary, target or self.target)
        self.committed = True
        if durable:
            fsync_directory(self.target.parent)

    def discard(self) -> None:
        """Close what is open; remove the temporary unless it was committed. Errors here are ignored, so as not to hide an earlier one."""
        with contextlib.suppress(OSError):
            self.file.close()
        if not self.committed:
            with contextlib.suppress(OSError):
                patiently(os.unlink, self.temporary)
        self._release()

    def _release(self) -> None:
        if self._mark is not None and self._mark >= 0:
            with contextlib.suppress(OSError):
                os.close(self._mark)
            self._mark = -1

    def failure(self, error: OSError, path: PathLike) -> CheckpointError:
        return (unsynced_error if self.committed else save_error)(error, path)


def _mark_as_alive(descriptor: int) -> int | None:
    """Lock a temporary while its writer is alive. Returns a descriptor to close at the end (-1 if there is none), or None if
    another writer removed the file as abandoned before it was locked."""
    if lock(descriptor, wait=True) is not Lock.HELD or is_windows():
        return -1
    if os.fstat(descriptor).st_nlink:
        return os.dup(descriptor)  # shares the lock, and keeps it when the file is closed before the rename
    return None


def remove_abandoned(target: Path) -> None:
    """Delete temporaries left behind by killed writers of `target`: those that are not locked. Without lock support, none."""
    try:
        names = os.listdir(target.parent)
    except OSError:
        return
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(?:\d+-)?[0-9a-f]{{8}}\.tmp")  # the first releases added the process's number
    found = [*filter(pattern.fullmatch, names)]
    if not found:
        return
    with directory_lock(target.parent) if is_windows() else contextlib.nullcontext():
        for name in found:
            with contextlib.suppress(OSError):  # already deleted
                _remove_if_abandoned(target.parent / name)


def _remove_if_abandoned(place: Path) -> None:
    descriptor = os.open(place, os.O_RDWR | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    try:
        abandoned = lock(descriptor, wait=False) is Lock.HELD
        if abandoned and not is_windows():
            os.unlink(place)
    finally:
        os.close(descriptor)
    if abandoned and is_windows():  # which deletes no open file
        os.unlink(place)


def _is_read_only(place: Path) -> bool:
    try:
        return not place.stat().st_mode & stat.S_IWUSR
    except OSError:
        return False


@contextlib.contextmanager
def pending_file(path: PathLike) -> Iterator[PendingFile]:
    """A `PendingFile` that is removed unless it was committed. Errors of the file system become `CheckpointError`."""
    with discarding(lambda: PendingFile(path), path) as pending:
        yield pending
        remove_abandoned(pending.target)


class Pending(Protocol):
    """A file, folder or set of files that is being written."""

    def discard(self) -> None:
        """Close and unlock it, and remove what was not committed."""

    def failure(self, error: OSError, path: PathLike) -> CheckpointError:
        """What to tell the user: which content is in place now."""


P = TypeVar("P", bound=Pending)


@contextlib.contextmanager
def discarding(begin: Callable[[], P], path: PathLike) -> Iterator[P]:
    """What `begin` returns, discarded at the end of the block. Errors of the file system become `CheckpointError`."""
    pending: P | None = None
    try:
        pending = begin()
        yield pending
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise (save_error if pending is None else pending.failure)(error, path) from error
    finally:
        if pending is not None:
            pending.discard()


def save_error(error: OSError, path: PathLike) -> CheckpointError:
    missing = isinstance(error, FileNotFoundError)
    kind = MissingFileError if missing else CheckpointError
    remedy = "Create the folder first." if missing else None
    whole = os.path.abspath(path)
    if is_windows() and (len(whole) > _LONGEST_PATH or (missing and os.path.isdir(os.path.dirname(whole)))):  # parts have longer names
        remedy = "Choose a shorter path: Windows allows 260 characters unless long paths are enabled."
    elif is_windows() and isinstance(error, PermissionError):
        remedy = "Close what has it open: Windows replaces no file that is open or mapped, and none that is read-only."
    return kind(f"can't be written ({error.strerror or error}); what was there before is untouched", path=path, remedy=remedy)


_LONGEST_PATH = 260 - 1 - len("..0123abcd.tmp")
"""What a temporary beside it leaves of the 260 characters."""


def unsynced_error(error: OSError, path: PathLike) -> CheckpointError:
    return CheckpointError(f"the new file is in place, but may not outlast a power failure ({error.strerror or error})", path=path)


def fsync_directory(folder: Path) -> None:
    """Make a rename in `folder` durable. Windows has no such call and needs none."""
    if is_windows():
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder without read permission can't be synced
        return
    try:
        sync(descriptor)
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def padding(position: int, alignment: int = ALIGNMENT) -> int:
    """Bytes from `position` to the next multiple of `alignment`."""
    return -position % alignment


def string_array(texts: list[str], shape: tuple[int, ...]) -> Any:
    """A string tensor: a numpy object array of `str`."""
    array = np.empty(len(texts), dtype=object)
    array[:] = texts
    return array.reshape(shape)


def warn(message: str) -> None:
    """Warn with a stack level that points at the caller outside this library."""
    prefix = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the whole package
    frame, level = sys._getframe(1), 2
    while frame.f_back and os.path.abspath(frame.f_code.co_filename).startswith(prefix):
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(message), CheckpointWarning, stacklevel=level)
