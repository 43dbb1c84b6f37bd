"""Fault scenarios in processes of their own: `python -m tests.training.faults SCENARIO DIRECTORY [COUNT]` prints one JSON line.

kill: a training that saves at every update, killed at random moments again and again. full: saves until a small file system is full.
denied: saves into a directory that refuses writing.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.training.setups import data, plain
from torch_ort_ckpt.training.entry import read_entry
from torch_ort_ckpt.training.feed import Feed

TARGET = 10**9


def train(directory: Path, until: int, background: bool = False) -> str:
    """Resume, then save after every update, keeping three entries; the digest of the weights at the end."""
    setup, progress = plain(), {"step": 0}
    feed = Feed(data())
    manager = toc.CheckpointManager(directory, max_num_checkpoints=3, keep_best="loss", async_save=background)
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
    manager.close()
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in setup.parameters().values())).hexdigest()


def kill(directory: Path, count: int) -> dict[str, Any]:
    """Fork, kill after a random time, look at what is there; in the end the weights must be those of a run that was never killed."""
    torch.set_num_threads(1)
    import_all(directory.with_name("warm"))
    generator = random.Random(count)
    newest = interrupted = lost = 0
    for number in range(count):
        child = os.fork()
        if not child:
            try:
                train(directory, TARGET, background=number % 2 == 1)
            finally:
                os._exit(1)
        time.sleep(generator.uniform(0.0, 0.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = list(directory.iterdir()) if directory.exists() else []
        interrupted += any(place.suffix in (".tmp", ".old") for place in found)
        steps = []
        for place in found:
            if place.name.startswith("checkpoint_"):
                entry = read_entry(place)
                entry.verify()
                steps.append(entry.step)
        if max(steps, default=0) < newest:
            lost += 1
        newest = max(newest, *steps, 0)
    end = newest + 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a damaged entry would be a warning
        resumed = train(directory, end)
    whole = train(directory.with_name("whole"), end)
    leftovers = [place.name for place in directory.iterdir() if place.name.startswith(".")]
    return {"kills": count, "inside a save": interrupted, "lost": lost, "steps": end, "equal": resumed == whole, "leftovers": leftovers}


def import_all(directory: Path) -> None:
    """What is imported on first use, so that the children spend their short lives saving."""
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
    leftovers = [place.name for place in directory.iterdir() if place.name.startswith(".")]
    (directory / "checkpoint_1").rename(directory / ".checkpoint_1.0123abcd.old")  # makes room
    goes_on = toc.CheckpointManager(directory).save(2000, model) is not None
    return {"saved": saved, "message": message, "whole": whole, "leftovers": leftovers, "warned": warned, "goes on": goes_on}


def told(directory: Path, step: int, model: nn.Module) -> list[str]:
    """The warnings of a manager that may not stop the run."""
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
    answer = kill(place, int(sys.argv[3])) if scenario == "kill" else {"full": full, "denied": denied}[scenario](place)
    print(json.dumps(answer))
