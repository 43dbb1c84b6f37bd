"""Fault scenarios in processes of their own: `python -m tests.training.faults SCENARIO DIRECTORY [COUNT LOCKS]` prints one JSON line.

kill: a training that saves at every update, killed at random operations again and again. matrix: single saves and start-ups, killed at
every COUNT-th operation and every rename. full: saves until a small file system is full.
denied: saves into a directory that refuses writing.

LOCKS is "flock", "refused" (as some network file systems do) or "none" (as on Windows).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.training.setups import data, plain
from torch_ort_ckpt.training.entry import read_entry
from torch_ort_ckpt.training.feed import Feed


def train(directory: Path, until: int, background: bool = False, saved: int | None = None) -> str:
    """Resume, then save after every update, keeping three entries; the digest of the weights at the end. Steps that are known to be
    saved are written to the descriptor `saved`."""
    setup = plain()
    progress: dict[str, Any] = {"step": 0}
    feed = Feed(data())
    manager = toc.CheckpointManager(directory, max_num_checkpoints=3, keep_best="loss", async_save=background, durable=False)
    manager.restore(setup.model, setup.optimizer, scheduler=setup.scheduler, data=feed, progress=progress)
    while progress["step"] < until:
        loss = setup.loss(next(feed))
        loss.backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        setup.scheduler.step()
        progress["step"] += 1
        manager.save(
            progress["step"],
            setup.model,
            setup.optimizer,
            scheduler=setup.scheduler,
            data=feed,
            progress=progress,
            metrics={"loss": float(loss.detach())},
        )
        if saved is not None and manager.last_saved:
            REAL_WRITE(saved, struct.pack("<I", manager.last_saved))
    manager.close()
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in setup.parameters().values())).hexdigest()


def kill(directory: Path, count: int, locks: str) -> dict[str, Any]:
    """Fork, kill at a random operation, look at what is there; in the end the weights must be those of a run that was never killed.

    No clock is involved: how far a run gets depends on the operation it is killed at, not on the machine.
    """
    set_locks(locks)
    import_all(directory.with_name("warm"))
    generator = random.Random(count)
    newest = interrupted = lost = 0
    for number in range(count):
        saved = forked(partial(train, directory, newest + 4, number % 2 == 1), generator.randrange(1, 200))
        found = list(directory.iterdir()) if directory.exists() else []
        interrupted += any(place.suffix in (".tmp", ".old") for place in found)
        for place in found:
            if place.name.startswith("checkpoint_"):
                read_entry(place).verify()
        with quiet():
            after = max((entry.step for entry in toc.CheckpointManager(directory).list()), default=0)
        lost += after < max([newest, *saved])
        newest = after
    end = newest + 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a damaged entry would be a warning
        resumed = train(directory, end)
    whole = train(directory.with_name("whole"), end)
    left = leftovers(directory)
    return {"kills": count, "inside a save": interrupted, "lost": lost, "steps": end, "equal": resumed == whole, "leftovers": left}


def matrix(root: Path, stride: int, locks: str) -> dict[str, Any]:
    """One save or start-up of each kind, killed at every `stride`-th of its operations: per kind, what was found afterwards."""
    import_all(root / "warm")
    set_locks(locks)
    answer: dict[str, Any] = {}
    for kind in ("replace", "rotate", "first", "start between renames", "start beside a replaced one", "lightning"):
        template, place, found = root / "template", root / "place", []
        prepare(template, kind)
        for operation in operations(template, place, kind, stride):
            shutil.copytree(template, place)
            forked(partial(act, place, kind), operation)
            found.append(look(place, kind))
            shutil.rmtree(place)
        shutil.rmtree(template)
        answer[kind] = found
    return answer


def operations(template: Path, place: Path, kind: str, stride: int) -> list[int]:
    """At which operations to kill: every `stride`-th, every rename and what follows it, and beyond the last one, which is not killed."""
    shutil.copytree(template, place)
    done = forked(partial(act, place, kind), 1 << 30, journal=True)
    shutil.rmtree(place)
    renames = [number for number, name in enumerate(done, start=1) if WATCHED[name] == "rename"]
    return sorted({*range(1, len(done), stride), *renames, *(number + 1 for number in renames), len(done) + 1})


def prepare(folder: Path, kind: str) -> None:
    folder.mkdir()
    if kind == "lightning":
        lightning(folder, 1.0)
    elif kind != "first":
        manager = toc.CheckpointManager(folder)
        for step in (1, 2):
            manager.save(step, filled(1.0))
    if kind.startswith("start"):
        toc.CheckpointManager(folder / "other").save(2, filled(2.0))
        os.rename(folder / "checkpoint_2", folder / ".checkpoint_2.123-0123abcd.old")
        name = ".checkpoint_2.123-89abcdef.tmp" if kind.endswith("renames") else "checkpoint_2"
        os.rename(folder / "other" / "checkpoint_2", folder / name)
        os.rmdir(folder / "other")


def act(folder: Path, kind: str, _: int) -> None:
    if kind == "lightning":
        lightning(folder, 2.0)
    elif kind.startswith("start"):
        toc.CheckpointManager(folder)
    else:
        manager = toc.CheckpointManager(folder, max_num_checkpoints=2, durable=False)
        manager.save({"replace": 2, "rotate": 3, "first": 1}[kind], filled(2.0))


def look(folder: Path, kind: str) -> dict[str, Any]:
    """Steps and their values after a new start, which must all be whole; and what is left beside them."""
    if kind == "lightning":
        from torch_ort_ckpt.integrations.lightning import read_lightning
        from torch_ort_ckpt.training.directory import recover

        recover(folder / "last.ckpt")
        values = {"last": float(read_lightning(folder / "last.ckpt")["state_dict"]["weight"][0, 0])}
        return {"values": values, "leftovers": leftovers(folder)}
    with quiet():
        entries = toc.CheckpointManager(folder).list()
    for entry in entries:
        entry.verify()
    values = {str(entry.step): float(entry.state().trainable["weight"][0, 0]) for entry in entries}
    return {"values": values, "leftovers": leftovers(folder)}


def lightning(folder: Path, value: float) -> None:
    from torch_ort_ckpt.integrations.lightning import write_lightning

    write_lightning({"state_dict": filled(value).state_dict(), "global_step": int(value), "epoch": 0}, folder / "last.ckpt")


def filled(value: float) -> nn.Module:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def leftovers(folder: Path) -> list[str]:
    """What is there beside the entries: its state, and whether it was being written (.tmp) or deleted (.old)."""
    found = []
    for place in sorted(folder.iterdir()):
        if place.name.startswith("."):
            state = "complete" if read_entry(place).problem is None else "incomplete"
            found.append(f"{state} {place.suffix}")
    return found


WATCHED = ("open", "write", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "chmod")
REAL_WRITE = os.write


def forked(action: Callable[[int], Any], operation: int, journal: bool = False) -> list[int]:
    """Run `action` in a fork that is killed before its n-th operation that changes the file system. Returns the numbers written to the
    pipe that it is given: by itself, or (`journal`) for each operation its place in `WATCHED`."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reader)
            die_at(operation, writer if journal else None)
            with quiet():
                action(writer)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as pipe:
        numbers = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return [number for (number,) in struct.iter_unpack("<I", numbers)]


def die_at(last: int, journal: int | None) -> None:
    counter = itertools.count(1)

    def wrapped(name: str, real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **more)
            if next(counter) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            if journal is not None:
                REAL_WRITE(journal, struct.pack("<I", WATCHED.index(name)))
            return real(*args, **more)

        return call

    for name in WATCHED:
        setattr(os, name, wrapped(name, getattr(os, name)))


def set_locks(kind: str) -> None:
    """Take locks away from this process and its children."""
    if kind == "none":
        sys.modules["fcntl"] = None  # type: ignore[assignment]
    elif kind == "refused":
        import fcntl

        def refuse(descriptor: Any, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        fcntl.flock = refuse


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def import_all(directory: Path) -> None:
    """What is imported on first use, so that the children are killed while they save, not while they import."""
    torch.set_num_threads(1)
    setup = plain()
    for parameter in setup.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    setup.optimizer.step()
    manager = toc.CheckpointManager(directory)
    manager.save(1, setup.model, setup.optimizer)
    manager.restore(setup.model, setup.optimizer)


def full(directory: Path) -> dict[str, Any]:
    """`directory` lies on a file system of a few megabytes."""
    model = nn.Linear(300, 300)
    manager = toc.CheckpointManager(directory, max_num_checkpoints=None)
    saved, message = 0, ""
    for step in range(1, 100):
        try:
            manager.save(step, model)
            saved = step
        except toc.CheckpointError as error:
            message = str(error)
            break
    warned = told(directory, 1000, model)
    whole = [entry.step for entry in manager.list() if entry.problem is None]
    for entry in manager.list():
        entry.verify()
    left = leftovers(directory)
    shutil.rmtree(directory / "checkpoint_1")  # makes room
    goes_on = toc.CheckpointManager(directory).save(2000, model) is not None
    return {"saved": saved, "message": message, "whole": whole, "leftovers": left, "warned": warned, "goes on": goes_on}


def told(directory: Path, step: int, model: nn.Module) -> list[str]:
    """The warnings of a manager with on_error="warn"."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        toc.CheckpointManager(directory, on_error="warn").save(step, model)
    return [str(item.message) for item in caught if issubclass(item.category, toc.CheckpointWarning)]


def denied(directory: Path) -> dict[str, Any]:
    """Run as a user without rights to the directory, in which entries exist already."""
    model = nn.Linear(3, 3)
    manager = toc.CheckpointManager(directory)
    manager.save(1, model)
    os.chmod(directory, 0o555)
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)
    message = ""
    try:
        manager.save(2, model)
    except toc.CheckpointError as error:
        message = str(error)
    warned = told(directory, 3, model)
    for entry in manager.list():
        entry.verify()
    whole = [entry.step for entry in manager.list()]
    return {"message": message, "whole": whole, "files": sorted(os.listdir(directory)), "warned": warned}


def mounted(directory: Path) -> int:
    """Run `full` on a tmpfs of 4 MB that only this process and its children see."""
    command = f'mount -t tmpfs -o size=4m tmpfs "{directory}" && exec "{sys.executable}" -m tests.training.faults full "{directory}"'
    return subprocess.run(["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c", command], check=False).returncode


if __name__ == "__main__":
    scenario, place = sys.argv[1], Path(sys.argv[2])
    if scenario == "mounted":
        sys.exit(mounted(place))
    if scenario in ("kill", "matrix"):
        answer = {"kill": kill, "matrix": matrix}[scenario](place, int(sys.argv[3]), sys.argv[4])
    else:
        answer = {"full": full, "denied": denied}[scenario](place)
    print(json.dumps(answer))
