"""What runs in the processes that `test_crash.py` and `test_full_disk.py` start: writers that are killed, or that the system refuses.

They come from multiprocessing's forkserver, which loads this module (and torch) once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

with contextlib.suppress(ImportError):  # not on Windows
    import resource

import torch_ort_ckpt as toc
from torch_ort_ckpt.formats.ort import checkpoint as ort
from torch_ort_ckpt.formats.ort import sidecar
from torch_ort_ckpt.storage import folders

with contextlib.suppress(ImportError):  # Windows has none. Here, because a process without rights may not be able to
    import resource

forkserver: Any = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")  # Windows has only the latter
forkserver.set_forkserver_preload(["tests.writers"])


def run(function: Callable[..., None], *args: object) -> int | None:
    """Call a function of this module in a process of its own; the exit code."""
    process = forkserver.Process(target=function, args=args)
    process.start()
    process.join()
    return process.exitcode


def old() -> toc.CheckpointState:
    return _state(0.0)


def new() -> toc.CheckpointState:
    return _state(1.0)


def shuffled() -> toc.CheckpointState:
    """Numbers and letters in one order; `reshuffled` has the same ones in another. Sums can't tell them apart."""
    return _shuffled(0)


def reshuffled() -> toc.CheckpointState:
    return _shuffled(8)


def _shuffled(by: int) -> toc.CheckpointState:
    values = torch.arange(1200.0).reshape(40, 30)
    moments = {"w": {"momentum0": values.roll(by), "momentum1": values.roll(by, 0)}}
    return toc.CheckpointState({"w": values.roll(by)}, optimizer={"group0": toc.OptimizerGroup(1, 0.001, states=moments)})


def _state(value: float) -> toc.CheckpointState:
    moments = {"w": {"momentum0": torch.full((40, 30), value), "momentum1": torch.full((40, 30), value + 0.25)}}
    return toc.CheckpointState(
        trainable={"w": torch.full((40, 30), value + 0.5)},
        frozen={"scale": torch.full((), value)},
        optimizer={"group0": toc.OptimizerGroup(int(value) + 1, 0.001, 0.01 + value, moments)},
        properties={"epoch": int(value)},
    )


def save_and_die(path: Path, options: dict[str, Any], step: int, journal: Path, make: Callable[[], toc.CheckpointState] = new) -> None:
    """Save `make()`, killing this process before its `step`-th operation on the file system; each goes into the journal first."""
    _install(step, journal)
    toc.save(make(), path, **options)


def repair_and_die(path: Path, step: int, journal: Path) -> None:
    _install(step, journal)
    sidecar.repair(path)


def save_folder_and_die(path: Path, format: str, step: int, journal: Path) -> None:
    _install(step, journal)
    toc.save(new(), path, format=format)


def repair_folder_and_die(path: Path, step: int, journal: Path) -> None:
    _install(step, journal)
    folders.repair(path)


def save_forever(path: Path, kinds: tuple[bool, bool], started: Connection) -> None:
    """Save `old()` and `new()` in turn until someone kills this process."""
    started.send(None)
    while True:
        for make, external in zip((new, old), kinds, strict=True):
            toc.save(make(), path, external_data=external, durable=False)


def save_many(path: Path, kinds: tuple[bool, bool], count: int, start: Connection) -> None:
    """Say that this process is there, wait for an answer, then save `new()` and `old()` in turn so many times."""
    start.send(None)
    start.recv()
    for _ in range(count):
        for make, external in zip((new, old), kinds, strict=True):
            toc.save(make(), path, external_data=external, durable=False)


def save_or_say_why(path: Path, external: bool, answer: Path) -> None:
    """Save 800 kB; what went wrong, if anything, goes into the file `answer`."""
    big = toc.CheckpointState(
        trainable={"w": torch.ones(100_000)},
        optimizer={"group0": toc.OptimizerGroup(1, states={"w": {"momentum0": torch.ones(100_000)}})},
    )
    assert ort is not None  # loaded already: a process without rights may not be able to
    descriptor = os.open(answer, os.O_WRONLY | os.O_CREAT)
    try:
        toc.save(big, path, external_data=external)
        told: list[str | None] = [None, None, None]
    except toc.CheckpointError as error:
        told = [type(error).__name__, error.path, str(error)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.write(descriptor, json.dumps(told).encode())


def save_with_size_limit(path: Path, external: bool, answer: Path, limit: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    save_or_say_why(path, external, answer)


def save_without_rights(path: Path, external: bool, answer: Path) -> None:
    """As a user whom permissions apply to: root becomes nobody."""
    answer.touch()
    answer.chmod(0o666)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    save_or_say_why(path, external, answer)


def save_on_small_disk(path: Path, external: bool, answer: Path, size: str) -> None:
    """Put the folder on a tmpfs of that size, save there, and take what is in it afterwards back. Nobody else sees the mount."""
    folder, copy = path.parent, path.parent.with_name("copy")
    shutil.copytree(folder, copy)
    mount_small_disk(folder, size)
    shutil.copytree(copy, folder, dirs_exist_ok=True)
    save_or_say_why(path, external, answer)
    shutil.rmtree(copy)
    shutil.copytree(folder, copy)


def mount_small_disk(folder: Path, size: str) -> None:
    new_mounts, new_user, private = 0x20000, 0x10000000, 0x44000
    libc = ctypes.CDLL(None, use_errno=True)
    flags = new_mounts | (0 if os.geteuid() == 0 else new_user)
    for code in (
        libc.unshare(flags),
        libc.mount(b"none", b"/", None, private, None),
        libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()),
    ):
        if code:
            raise OSError(ctypes.get_errno(), "can't mount")


_WATCHED = ("open", "fsync", "replace", "unlink", "chmod", "rename", "mkdir", "rmdir")


def _install(last: int, journal: Path) -> None:
    log = journal.open("w", buffering=1)
    names: dict[int, str] = {}
    done = 0
    real = {name: getattr(os, name) for name in ("write", *_WATCHED)}

    def step(*what: Any) -> None:
        nonlocal done
        done += 1
        if done == last:
            os.kill(os.getpid(), signal.SIGKILL)
        log.write(json.dumps([str(item) for item in what]) + "\n")

    def wrapped(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            step(name, *(names.get(arg, arg) if name == "fsync" else arg for arg in args))
            result = real[name](*args, **options)
            if name == "open":
                names[result] = str(args[0])
            return result

        return call

    def write(descriptor: int, data: Any) -> int:
        """A write that can be cut in two."""
        half = len(data) // 2
        step("write", len(data))
        written: int = real["write"](descriptor, data[:half])
        step("rest of write", len(data))
        return written + int(real["write"](descriptor, data[half:]))

    os.write = write
    for name in _WATCHED:
        setattr(os, name, wrapped(name))


def is_new(path: Path, repair: Callable[[Path], bool]) -> bool:
    """Whether the new state is there, bit for bit; fails unless it or the old one is, with and without repair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", toc.CheckpointWarning)  # "the last save was interrupted"
        found = toc.load(path)
    assert found in (old(), new())
    repair(path)
    assert toc.load(path) == found  # and no warning now
    assert not repair(path)
    return found == new()
