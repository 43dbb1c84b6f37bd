"""Manifests are checked before they are used. A damaged or hostile one makes its own entry unusable, never the directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.training.setups import assert_equal, plain
from torch_ort_ckpt.cli import main
from torch_ort_ckpt.storage.hashing import bytes_hash
from torch_ort_ckpt.training.entry import read_entry

V1 = Path(__file__).parents[1] / "data" / "manager_v1"
"""A directory that the library wrote when its manifests had version 1: `plain(1)` saved as step 1, `plain(2)` as step 2."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with steps 1 and 2."""
    folder = tmp_path / "run"
    manager = toc.CheckpointManager(folder, durable=False)
    for step in (1, 2):
        setup = plain(step)
        manager.save(step, setup.model, setup.optimizer, metrics={"loss": 1.0 / step}, progress={"step": step})
    return folder


def resumed(folder: Path, skipped: bool) -> toc.CheckpointState | Any:
    """The entry that a new manager resumes from; with `skipped`, it must say that it left one out."""
    other = plain(9)
    manager = toc.CheckpointManager(folder)
    if skipped:
        with pytest.warns(toc.CheckpointWarning, match="skipping a damaged"):
            entry = manager.restore(other.model, other.optimizer)
    else:
        entry = manager.restore(other.model, other.optimizer)
    if entry is not None:
        assert_equal(plain(entry.step).parameters(), other.parameters())
    return entry


def edit(folder: Path, change: Callable[[dict[str, Any]], None], *, hashed: bool = False) -> None:
    """Change a manifest as an accident would, or (`hashed`) as a program would that knows how to make its hash."""
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    if hashed:
        content.pop("hash", None)
        content["hash"] = bytes_hash(json.dumps(content, sort_keys=True).encode())
    (folder / "manifest.json").write_text(json.dumps(content))


# The hash


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:8] + data[16:24] + data[8:16] + data[24:],
        lambda data: data[:4096] + data[8192:12288] + data[4096:8192] + data[12288:],
        lambda data: bytes([data[0] ^ 1]) + data[1:8] + bytes([data[8] ^ 1]) + data[9:],
    ],
    ids=["words", "sectors", "opposite flips"],
)
def test_bytes_that_changed_places_are_noticed(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """Changes that a plain checksum (a sum of words) does not detect."""
    model = torch.nn.Linear(64, 64)
    with torch.no_grad():
        model.weight.copy_(torch.arange(4096.0).view(64, 64))
    manager = toc.CheckpointManager(tmp_path)
    manager.save(1, model)
    path = tmp_path / "checkpoint_1" / "checkpoint"
    data = path.read_bytes()
    start = data.index(model.weight.detach().numpy().tobytes()[:64])
    start += -start % 4096
    changed = data[:start] + damage(data[start:])
    assert changed != data
    path.write_bytes(changed)
    with pytest.raises(toc.CheckpointError, match="checksum does not match the manifest"):
        manager.list()[0].verify()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(step=6),
        lambda m: m.update(ranks=2),
        lambda m: m.update(created=1.0),
        lambda m: m["metrics"].update(loss=0.0),
        lambda m: m["metrics"].update(other=0.0),
        lambda m: m["files"].pop("training.json"),
        lambda m: m["files"].update(checkpoint=m["files"].pop("training.json")),
        lambda m: m.pop("hash"),
        lambda m: m.update(hash="0" * 32),
        lambda m: m.update(hash=None),
        lambda m: m.update(version=1),
        lambda m: m.update(more=1),
    ],
)
def test_a_changed_manifest_is_noticed(change: Callable[[dict[str, Any]], None], run: Path) -> None:
    edit(run / "checkpoint_2", change)
    assert toc.CheckpointManager(run).latest().step == 1  # type: ignore[union-attr]
    assert resumed(run, skipped=True).step == 1


def test_a_flipped_bit_in_any_byte_of_a_manifest_is_noticed_or_means_the_same(run: Path) -> None:
    place = run / "checkpoint_2" / "manifest.json"
    data, entry = place.read_bytes(), read_entry(run / "checkpoint_2")
    for position in range(len(data)):
        place.write_bytes(data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :])
        found = read_entry(run / "checkpoint_2")
        assert found.problem is not None or found == entry, position


def test_a_renamed_entry_does_not_resume_as_another_step(run: Path) -> None:
    """Its content is step 2: under the name of step 6 it is ignored and not deleted, under its own name it is used again."""
    os.rename(run / "checkpoint_2", run / "checkpoint_6")
    entry = toc.CheckpointManager(run).list()[-1]
    assert "it holds step 2" in str(entry.problem)
    assert resumed(run, skipped=True).step == 1
    manager, setup = toc.CheckpointManager(run, max_num_checkpoints=1), plain()
    with pytest.warns(toc.CheckpointWarning, match=r"checkpoint_6 is kept: .* not under this name"):
        manager.save(7, setup.model)
    assert {place.name for place in run.iterdir()} == {"checkpoint_6", "checkpoint_7"}
    with pytest.raises(toc.CheckpointError, match="can't be replaced by a checkpoint"):
        manager.save(6, setup.model)
    os.rename(run / "checkpoint_6", run / "checkpoint_2")
    toc.CheckpointManager(run).list()[0].verify()


def test_an_entry_may_be_given_by_any_name(run: Path, tmp_path: Path) -> None:
    """A copy kept elsewhere, say as `best`, is named by the user and says its step itself."""
    shutil.copytree(run / "checkpoint_2", tmp_path / "best")
    other = plain(9)
    entry = toc.CheckpointManager(tmp_path / "new").restore(other.model, other.optimizer, entry=read_entry(tmp_path / "best"))
    assert entry is not None
    assert entry.step == 2


# Version 1


def test_entries_of_version_1_are_read_and_verified(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(V1, folder)
    assert json.loads((folder / "checkpoint_2" / "manifest.json").read_text())["version"] == 1
    for entry in toc.CheckpointManager(folder).list():
        entry.verify()
    assert resumed(folder, skipped=False).step == 2
    data = bytearray((folder / "checkpoint_2" / "checkpoint").read_bytes())
    data[len(data) // 2] ^= 4
    (folder / "checkpoint_2" / "checkpoint").write_bytes(data)
    assert resumed(folder, skipped=True).step == 1


def test_entries_of_version_1_rotate(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(V1, folder)
    manager, setup = toc.CheckpointManager(folder, max_num_checkpoints=1), plain()
    manager.save(2, setup.model)
    manager.save(3, setup.model)
    assert {place.name for place in folder.iterdir()} == {"checkpoint_3"}


def test_an_unknown_version_is_said_and_left_alone(run: Path) -> None:
    edit(run / "checkpoint_1", lambda m: m.update(version=3))
    manager = toc.CheckpointManager(run, max_num_checkpoints=1)
    assert "another version" in str(manager.list()[0].problem)
    manager.save(3, plain().model)
    assert {place.name for place in run.iterdir()} == {"checkpoint_1", "checkpoint_3"}


# One bad manifest

HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "infinite step": lambda m: m.update(step=float("inf")),
    "nan step": lambda m: m.update(step=float("nan")),
    "step of 400 digits": lambda m: m.update(step=10**400),
    "step of text": lambda m: m.update(step="2"),
    "negative step": lambda m: m.update(step=-2),
    "true step": lambda m: m.update(step=True),
    "half a step": lambda m: m.update(step=2.5),
    "metric of 400 digits": lambda m: m["metrics"].update(loss=10**400),
    "metric of text": lambda m: m["metrics"].update(loss="low"),
    "list of metrics": lambda m: m.update(metrics=[1]),
    "surrogate in a metric": lambda m: m["metrics"].update({"\ud800": 1.0}),
    "infinite time": lambda m: m.update(created=float("inf")),
    "time of 400 digits": lambda m: m.update(created=10**400),
    "no ranks": lambda m: m.update(ranks=0),
    "too many ranks": lambda m: m.update(ranks=10**9),
    "infinite size": lambda m: m["files"]["checkpoint"].update(size=float("inf")),
    "negative size": lambda m: m["files"]["checkpoint"].update(size=-1),
    "no checksum": lambda m: m["files"]["checkpoint"].update(checksum=None),
    "NUL in a name": lambda m: m["files"].update({"a\0b": m["files"]["checkpoint"]}),
    "surrogate in a name": lambda m: m["files"].update({"a\ud800": m["files"]["checkpoint"]}),
    "name outside": lambda m: m["files"].update({"../checkpoint_1/checkpoint": m["files"]["checkpoint"]}),
    "absolute name": lambda m: m["files"].update({"/etc/passwd": m["files"]["checkpoint"]}),
    "drive": lambda m: m["files"].update({"C:\\x": m["files"]["checkpoint"]}),
    "name of the folder": lambda m: m["files"].update({".": m["files"]["checkpoint"]}),
    "empty name": lambda m: m["files"].update({"": m["files"]["checkpoint"]}),
    "endless name": lambda m: m["files"].update({"a" * 5000: m["files"]["checkpoint"]}),
    "no such file": lambda m: m["files"].update({"other": m["files"]["checkpoint"]}),
    "no checkpoint": lambda m: m["files"].pop("checkpoint"),
    "version of text": lambda m: m.update(version="\ud800"),
    "list of files": lambda m: m.update(files=[]),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_skipped(name: str, version: int, run: Path) -> None:
    """Even one that carries the right hash, or needs none."""

    def change(content: dict[str, Any]) -> None:
        content["version"] = version
        HOSTILE[name](content)

    edit(run / "checkpoint_2", change, hashed=version == 2)
    if version == 1:
        edit(run / "checkpoint_2", lambda m: m.pop("hash", None))
    skipped(run)


RAW = {
    "empty": b"",
    "not text": b"\xff\xfe\x00",
    "a list": b"[]",
    "a number": b"2",
    "null": b"null",
    "deep nesting": b'{"version":' + b"[" * 200_000,
    "number of 5000 digits": b'{"version": 2, "step": ' + b"9" * 5000 + b"}",
    "NUL bytes": bytes(3000),
}


@pytest.mark.parametrize("name", RAW)
def test_bytes_that_are_no_manifest_are_skipped(name: str, run: Path) -> None:
    (run / "checkpoint_2" / "manifest.json").write_bytes(RAW[name])
    skipped(run)


def test_a_huge_manifest_is_not_read(run: Path) -> None:
    os.truncate(run / "checkpoint_2" / "manifest.json", 1 << 40)
    skipped(run)


@pytest.mark.posix  # FIFOs, devices, and links that need no rights
@pytest.mark.parametrize("victim", ["manifest.json", "checkpoint", "training.json", "rank_0.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "device", "loop", "folder", "dangling"])
def test_what_is_no_file_is_skipped(kind: str, victim: str, run: Path) -> None:
    place = run / "checkpoint_2" / victim
    place.unlink()
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to({"device": "/dev/zero", "loop": victim, "dangling": "nowhere"}[kind])
    skipped(run)


@pytest.mark.posix  # FIFOs, devices, and links that need no rights
@pytest.mark.parametrize("kind", ["fifo", "file", "loop"])
def test_what_is_no_folder_is_skipped(kind: str, run: Path) -> None:
    shutil.rmtree(run / "checkpoint_2")
    if kind == "fifo":
        os.mkfifo(run / "checkpoint_2")
    elif kind == "file":
        (run / "checkpoint_2").write_text("mine")
    else:
        (run / "checkpoint_2").symlink_to("checkpoint_2")
    skipped(run, stays=True)


def skipped(run: Path, stays: bool = False) -> None:
    """With a bad step 2 in the directory, listing, resuming, rotating and the command line work. (A hang ends at pytest's timeout.)"""
    assert resumed(run, skipped=True).step == 1
    for more in ([], ["--json"], ["--verify"]):
        assert main(["checkpoints", str(run), *more]) == 1
    manager = toc.CheckpointManager(run, max_num_checkpoints=1, durable=False)
    assert [entry.problem is None for entry in manager.list()] == [True, False]
    with pytest.warns(toc.CheckpointWarning, match="checkpoint_2 is kept") if stays else contextlib.nullcontext():
        manager.save(3, plain().model)
    assert {place.name for place in run.iterdir()} == ({"checkpoint_2", "checkpoint_3"} if stays else {"checkpoint_3"})
