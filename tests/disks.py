"""Saves on disks that misbehave: full ones, ones that write less than asked, ones that fail at the n-th call. What `test_disks.py` runs.

After each the old or the new state must load, and an error must have been raised unless it is the new one.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

import torch_ort_ckpt as toc
from torch_ort_ckpt.formats import FORMATS, module

from .writers import mount_small_disk

VARIANTS: dict[str, dict[str, Any]] = {
    "ort": {"format": "ort"},
    "ort-v1": {"format": "ort", "version": 1},
    "ort-pair": {"format": "ort", "external_data": True},
    "safetensors": {"format": "safetensors"},
    "safetensors-shards": {"format": "safetensors", "max_shard_size": 9000},
    "torch": {"format": "torch"},
    "torch-bare": {"format": "torch", "bare": True},
    "onnx": {"format": "onnx"},
    "onnx-pair": {"format": "onnx", "external_data": True},
    "pbseq": {"format": "pbseq"},
    "runner": {"format": "runner"},
    "ortcp": {"format": "ortcp"},
    "dcp": {"format": "dcp"},
}
assert {options["format"] for options in VARIANTS.values()} == {name for name in FORMATS if hasattr(module(name), "write")}

IN_PLACE = ("the new file is in place", "the new checkpoint is complete")
"""How errors say that the new state is there all the same."""

SOUND = {"old", "new", "new in place"}
"""What a save may come to. "new in place": with an error that says so."""

WEIGHTS = ("onnx", "onnx-pair", "torch-bare")  # hold nothing else
NAMES = {"onnx": "model.onnx", "onnx-pair": "model.onnx", "safetensors": "c.safetensors", "safetensors-shards": "c.safetensors"}
TEXTS = ("ort", "ort-v1", "ort-pair", "safetensors", "torch", "pbseq", "dcp")
"""Those that can hold a state of strings and properties alone."""


def state(variant: str, which: int, size: int, texts: bool = False) -> toc.CheckpointState:
    """The old (0) or the new (1) state: the same numbers and letters, in another order, so that sums can't tell them apart."""
    values = torch.arange(float(size)).roll(which)
    words = "".join(chr(97 + (index * index + which) % 26) for index in range(4 * size))
    if texts:
        array = np.empty(2, dtype=object)
        array[:] = [words, "short"]
        return toc.CheckpointState(frozen={"words": array}, properties={"text": words, "which": which})
    if variant in WEIGHTS:
        return toc.CheckpointState(trainable={"w": values, "v": values.flip(0)})
    moments = {name: {"momentum0": values + 2, "momentum1": values.flip(0)} for name in ("w", "v")}
    return toc.CheckpointState(
        trainable={"w": values, "v": values.flip(0)},
        optimizer={"group0": toc.OptimizerGroup(1, states=moments)},
        properties={"text": words},
    )


def place(folder: Path, variant: str) -> Path:
    return folder / NAMES.get(variant, "c")


def prepare(folder: Path, variant: str, old: toc.CheckpointState) -> Path:
    """A folder with the old state in it, and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = place(folder, variant)
    if variant in ("onnx", "onnx-pair"):
        write_model(path, old)
    save(old, path, variant)
    return path


def write_model(path: Path, state: toc.CheckpointState) -> None:
    """A model with the state's weights as initializers."""
    weights = [numpy_helper.from_array(value.numpy(), name) for name, value in state.trainable.items()]
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Add", ["w", "v"], ["y"])], "g", [], [output], weights)
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


def save(value: toc.CheckpointState, path: Path, variant: str, durable: bool = False) -> None:
    toc.save(value, path, durable=durable, **VARIANTS[variant])


def outcome(
    path: Path,
    variant: str,
    old: toc.CheckpointState,
    new: toc.CheckpointState,
    durable: bool = False,
    fault: contextlib.AbstractContextManager[Any] | None = None,
) -> str:
    """Save the new state over the old one, under this fault, and look at what is there: one of `SOUND`, or what went wrong."""
    before = set(os.listdir(path.parent))
    told = None
    try:
        with fault or contextlib.nullcontext():
            save(new, path, variant, durable)
    except toc.CheckpointError as error:
        told = str(error)
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"
    return judged(path, variant, old, new, told, before)


def judged(path: Path, variant: str, old: toc.CheckpointState, new: toc.CheckpointState, told: str | None, before: set[str]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", toc.CheckpointWarning)  # "the last save was interrupted"
            found = toc.load(path, mmap=False)
    except toc.CheckpointError as error:
        return f"lost: {error} (the save said: {told})"
    if found not in (old, new):
        return f"mixed (the save said: {told})"
    left = sorted(name for name in os.listdir(path.parent) if name.startswith("."))
    if told is None:
        return f"no error, yet it is the old one, and {left}" if found == old else "new, with leftovers" if left else "new"
    if found == new:
        return "new in place" if any(text in told for text in IN_PLACE) else f"the new one is there, the save said: {told}"
    if left or before != set(os.listdir(path.parent)):
        return f"left behind: {sorted(set(os.listdir(path.parent)) ^ before)}, {left}"
    return "old" if not any(text in told for text in IN_PLACE) else f"the old one is there, the save said: {told}"


def every_level(folder: Path, variant: str, size: int, texts: bool, levels: int, answer: Path) -> None:
    """Save with no page free, then one, then two ...: until it succeeds, or `levels` of those, evenly. Outcomes go into `answer`."""
    torch.set_num_threads(1)
    mount_small_disk(folder, "4m")
    home, filler = folder / "home", folder / "filler"
    old, new = state(variant, 0, size, texts), state(variant, 1, size, texts)
    prepare(home, variant, old)
    start = free_pages(folder)
    save(new, place(home, variant), variant)  # also imports all that is needed
    prepare(home, variant, old)
    found: list[tuple[int, str]] = []
    pages, successes = 0, 0
    needed = 2 * (os.statvfs(folder).f_blocks - start) + 8
    for pages in sorted({round(index * needed / levels) for index in range(levels + 1)} if levels else range(start)):
        path = prepare(home, variant, old)
        with open(filler, "wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, 4096 * (free_pages(folder) - pages)) if free_pages(folder) > pages else None
        assert free_pages(folder) == pages
        found.append((pages, outcome(path, variant, old, new)))
        os.unlink(filler)
        successes += found[-1][1] == "new"
        if successes == 2:
            break
    answer.write_text(json.dumps(found))


def many_datasets(folder: Path, answer: Path) -> None:
    """An HDF5 file of many datasets, whose bookkeeping is written all over the file; some of the writes fail."""
    old = toc.CheckpointState(trainable={f"w{number}": torch.full((3,), float(number)) for number in range(300)})
    new = toc.CheckpointState(trainable={name: value + 1 for name, value in old.trainable.items()})
    path = folder / "c.ortcp"
    toc.save(old, path)
    found = []
    for number in (*range(2, 400, 67), 10**9):
        hit: list[str] = []
        found.append(outcome(path, "ortcp", old, new, fault=failing(number, errno.ENOSPC, hit, ("write", "lseek", "ftruncate"))))
        assert bool(hit) == (number < 10**9)
    answer.write_text(json.dumps(found))


def free_pages(folder: Path) -> int:
    return os.statvfs(folder).f_bavail


CALLS = ("open", "write", "fsync", "replace", "rename", "mkdir", "rmdir", "unlink", "close", "chmod", "dup", "ftruncate", "lseek", "fstat")


@contextlib.contextmanager
def failing(number: int, code: int, hit: list[str], calls: tuple[str, ...] = CALLS) -> Iterator[None]:
    """The `number`-th of these calls fails; `hit` gets its name."""
    real = {name: getattr(os, name) for name in calls}
    counter = itertools.count(1)

    def wrapped(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if next(counter) != number:
                return real[name](*args, **options)
            hit.append(name)
            if name == "close":
                real[name](*args)  # Linux closes it all the same
            raise OSError(code, os.strerror(code))

        return call

    for name in calls:
        setattr(os, name, wrapped(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


@contextlib.contextmanager
def short_writes(limit: int) -> Iterator[list[int]]:
    """A disk that takes `limit` bytes at a time; the list gets what each call took."""
    real, taken = os.write, []

    def write(descriptor: int, data: Any) -> int:
        taken.append(real(descriptor, memoryview(data).cast("B")[:limit]))
        return taken[-1]

    os.write = write
    try:
        yield taken
    finally:
        os.write = real
