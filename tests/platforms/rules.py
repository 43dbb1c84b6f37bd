"""What is simulated, on Linux, by one audit hook: Python reports every file operation to it, and it may refuse.

Windows: no `fcntl`, `resource`, `preadv`, `fork`; `msvcrt.locking`; a file that is open or mapped, in this process or another of the
session, can't be renamed, replaced or deleted, nor a folder that contains one; nor a read-only file; folders can't be opened; names that
Windows does not have, and paths of 260 characters, can't be made. Both: names that differ only in case are the same file; processes are
spawned, not forked.
macOS: `F_FULLFSYNC` exists.

Not simulated: delete-pending files, drives, backslashes, other users' rights, and what other programs do.
"""

from __future__ import annotations

import builtins
import errno
import functools
import multiprocessing
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_FORBIDDEN = set('<>:"|?*\\') | {chr(code) for code in range(32)}
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{digit}" for port in ("com", "lpt") for digit in range(1, 10))}
_SIMULATED = ("/tmp", "/var/tmp", os.environ.get("TMPDIR", "/tmp"))
"""Where the rules hold: where tests write. Python's own folders and the system's are left alone."""


def enforce(system: str) -> None:
    """Put the rules in force, for good: an audit hook can't be removed."""
    import subprocess  # noqa: F401  # before `msvcrt` can be imported: it tells Windows by it

    if hasattr(sys, "toc_platform"):  # a worker of pytest, which started under them
        return
    sys.toc_platform = system  # type: ignore[attr-defined]
    children = Path(__file__).parent / "children"
    os.environ["TOC_PLATFORM"] = system
    paths = [os.fspath(children), os.fspath(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, ":".join(paths).split(":"))))
    multiprocessing.set_start_method("spawn", force=True)
    if system == "windows":
        _windows()
    else:
        _macos()
    sys.addaudithook(_WINDOWS_HOOK if system == "windows" else _MACOS_HOOK)


def _windows() -> None:
    import fcntl

    locks = _msvcrt(fcntl)
    original = builtins.__import__

    def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        ours = str((globals or {}).get("__name__", "")).partition(".")[0] in (
            "torch_ort_ckpt",
            "tests",
            "__main__",
            "benchmarks",
            "examples",
        )
        if ours and level == 0 and name in ("fcntl", "resource"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if ours and level == 0 and name == "msvcrt":
            return locks
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = imported
    for name in ("preadv", "preadv2", "pwritev", "posix_fadvise", "fork", "forkpty", "mkfifo"):
        if hasattr(os, name):
            delattr(os, name)
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # it opens folders
    gate = os.open(os.path.join(tempfile.gettempdir(), "windows-rules.gate"), os.O_RDWR | os.O_CREAT, 0o666)
    for name in ("open", "unlink", "remove", "rename", "replace", "rmdir"):
        setattr(os, name, _one_at_a_time(getattr(os, name), gate, fcntl))


_gate = threading.Lock()


def _one_at_a_time(call: Callable[..., Any], gate: int, fcntl: ModuleType) -> Callable[..., Any]:
    """Windows looks whether a file is in use and deletes it in one step. The hook looks before the call, so nobody may open it between."""

    @functools.wraps(call)
    def alone(*arguments: Any, **options: Any) -> Any:
        with _gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            try:
                return call(*arguments, **options)
            finally:
                fcntl.flock(gate, fcntl.LOCK_UN)

    return alone


def _msvcrt(fcntl: ModuleType) -> ModuleType:
    """`msvcrt.locking`: a lock on bytes from the file's position on, that belongs to the open file, as an OFD lock of Linux."""
    import struct

    module = ModuleType("msvcrt")
    set_lock = 37  # F_OFD_SETLK, which Python names from 3.12 on

    def locking(descriptor: int, mode: int, count: int) -> None:
        kind = fcntl.F_UNLCK if mode == 0 else fcntl.F_WRLCK
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            fcntl.fcntl(descriptor, set_lock, struct.pack("hhqqi", kind, os.SEEK_SET, position, count, 0))
        except OSError as error:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from error

    module.locking, module.LK_UNLCK, module.LK_LOCK, module.LK_NBLCK = locking, 0, 1, 2  # type: ignore[attr-defined]
    return module


def _macos() -> None:
    import fcntl

    original = fcntl.fcntl

    def with_full_sync(descriptor: Any, command: int, argument: Any = 0) -> Any:
        if command != 51:
            return original(descriptor, command, argument)
        os.fsync(descriptor)
        return 0

    fcntl.F_FULLFSYNC = 51  # type: ignore[attr-defined, misc, unused-ignore]
    fcntl.fcntl = with_full_sync
    del os.posix_fadvise


def _WINDOWS_HOOK(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
        paths = _paths(event, arguments)
        if not all(paths) or not all(path.startswith(_SIMULATED) for path in paths):
            return
        if event == "open":
            _opened(paths[0], *arguments[1:])
        elif event == "os.mkdir":
            _named(paths[0])
        else:
            for path in paths:
                _unused(path, deleted=event != "os.rename" or path != paths[0])
            if event == "os.rename":
                _named(paths[1], moved=paths[0])


def _MACOS_HOOK(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.rename", "os.mkdir"):
        paths = _paths(event, arguments)
        if not all(paths) or not all(path.startswith(_SIMULATED) for path in paths):
            return
        if event != "open" or arguments[2] & os.O_CREAT:
            _same_but_for_case(paths[-1], paths[0])


def _paths(event: str, arguments: tuple[Any, ...]) -> list[str]:
    """The absolute paths of an operation; empty text for what is not a path."""
    given = arguments[:2] if event == "os.rename" else arguments[:1]
    return [os.path.abspath(os.fsdecode(path)) if isinstance(path, (str, bytes, os.PathLike)) else "" for path in given]


def _opened(path: str, mode: str | None, flags: int) -> None:
    if os.path.isdir(path):
        if mode or flags & os.O_TMPFILE == os.O_TMPFILE:  # `tempfile.TemporaryFile` on Linux
            return
        raise PermissionError(errno.EACCES, "Permission denied (Windows opens no folders)", path)
    if flags & os.O_CREAT:
        _named(path)
    if flags & (os.O_WRONLY | os.O_RDWR) and _is_read_only(path):
        raise PermissionError(errno.EACCES, "Permission denied (read-only)", path)


def _named(path: str, moved: str | None = None) -> None:
    if len(path) >= 260:  # with the final zero
        raise FileNotFoundError(errno.ENOENT, "The system cannot find the path specified", path)
    name = os.path.basename(path)
    if _FORBIDDEN & set(name) or name.endswith((".", " ")) or name.split(".")[0].lower() in _RESERVED:
        raise OSError(errno.EINVAL, "The filename, directory name, or volume label syntax is incorrect", path)
    _same_but_for_case(path, moved)


def _same_but_for_case(path: str, moved: str | None) -> None:
    folder, name = os.path.split(path)
    try:
        others = [item for item in os.listdir(folder) if item != name and item.casefold() == name.casefold()]
    except OSError:
        return
    if others and moved != os.path.join(folder, others[0]):
        raise AssertionError(f"{path}: on a file system that ignores case it would be {others[0]}")


def _unused(path: str, deleted: bool) -> None:
    """Raise if a file, or one inside a folder, is open or mapped."""
    try:
        found = os.lstat(path)
    except OSError:
        return
    if stat.S_ISREG(found.st_mode):
        places = [path]
        if deleted and not found.st_mode & stat.S_IWUSR:
            raise PermissionError(errno.EACCES, "Access is denied (read-only)", path)
    elif stat.S_ISDIR(found.st_mode):
        places = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    else:
        return
    wanted = {(item.st_dev, item.st_ino): place for place in places if (item := _status(place))}
    if wanted and (used := wanted.keys() & _in_use()):
        name = min(wanted[key] for key in used)
        raise PermissionError(errno.EACCES, f"The process cannot access the file because it is being used ({name})", path)


def _in_use() -> set[tuple[int, int]]:
    """Device and inode of every file that this process, or another of the session, has open or mapped."""
    session, found = os.getsid(0), set()
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(number)) != session:
                continue
            for entry in os.scandir(f"/proc/{number}/fd"):
                status = _status(entry.path)  # none if it was closed meanwhile
                if status is not None and stat.S_ISREG(status.st_mode):
                    found.add((status.st_dev, status.st_ino))
            with open(f"/proc/{number}/maps") as lines:
                for line in lines:
                    fields = line.split(maxsplit=5)
                    if fields[4] != "0" and len(fields) == 6:
                        major, minor = fields[3].split(":")
                        found.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _is_read_only(path: str) -> bool:
    status = _status(path)
    return status is not None and not status.st_mode & stat.S_IWUSR
