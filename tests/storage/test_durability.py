"""What a power failure leaves: every file holds all its bytes when it is synced, is synced before it gets its name, and so is its name.

Looked at from below: what the file system has for a file at the moment of its fsync, whichever object wrote it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests import disks
from tests.training.setups import ADAMW, plain
from torch_ort_ckpt.storage.ownership import MARKER

pytestmark = [pytest.mark.posix, pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at open files through Linux's /proc")]


class Medium:
    """Notes each fsync with the bytes that the file has then, and each rename, all by inode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, durable: bool = True) -> None:
        self.strict = durable
        self.old = {path.stat().st_ino for path in folder.rglob("*")}
        self.events: list[tuple[str, int, Any]] = []
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._noted(getattr(os, name)))

    def fsync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            self.events.append(("synced folder", found.st_ino, found.st_mtime_ns))
        else:
            self.events.append(("synced file", found.st_ino, Path(f"/proc/self/fd/{descriptor}").read_bytes()))
        self._fsync(descriptor)

    def _noted(self, real: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **options: Any) -> None:
            moved = os.lstat(source)
            if stat.S_ISDIR(moved.st_mode) and self.strict and moved.st_ino not in self.old:
                assert ("synced folder", moved.st_ino, moved.st_mtime_ns) in self.events, f"{source} has names that were not synced"
            if self.strict and self.events and self.events[-1][0] == "renamed folder":
                raise AssertionError(f"{source} is renamed before the rename of a folder is synced")
            real(source, target, **options)
            self.events.append(("renamed", moved.st_ino, os.stat(Path(target).parent).st_ino))
            if stat.S_ISDIR(moved.st_mode):
                self.events.append(("renamed folder", moved.st_ino, None))

        return rename

    def positions(self, what: str, inode: int) -> list[int]:
        return [index for index, event in enumerate(self.events) if event[:2] == (what, inode)]

    def check(self, folder: Path) -> None:
        """Nothing below `folder`, nor the names in it, would be lost."""
        for path in [folder, *folder.rglob("*")]:
            inode = path.stat().st_ino
            if path.is_dir():
                named = [index for index, event in enumerate(self.events) if event[0] == "renamed" and event[2] == inode]
                if named:
                    assert max(self.positions("synced folder", inode), default=-1) > named[-1], f"{path} after the renames in it"
                continue
            if path.name == MARKER:
                continue  # without it the folder is kept, which is safe
            synced = self.positions("synced file", inode)
            assert synced, f"{path} is never synced"
            assert self.events[synced[-1]][2] == path.read_bytes(), f"{path} was not complete when it was synced"
            shown = folder / path.relative_to(folder).parts[0]  # what gets its name last: the file, or the folder it is in
            for renamed in self.positions("renamed", shown.stat().st_ino)[-1:]:
                assert synced[-1] < renamed, f"{path} was synced after it got its name"


@pytest.mark.parametrize("variant", disks.VARIANTS)
def test_a_save_is_on_the_medium_before_it_has_its_name(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if variant == "ortcp":
        pytest.importorskip("h5py")
    path = disks.prepare(tmp_path / "folder", variant, disks.state(variant, 0, 1500))
    medium = Medium(monkeypatch, tmp_path)
    disks.save(disks.state(variant, 1, 1500), path, variant, durable=True)
    assert medium.events
    medium.check(path.parent)


@pytest.mark.parametrize("variant", disks.VARIANTS)
def test_without_durable_nothing_is_synced(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if variant == "ortcp":
        pytest.importorskip("h5py")
    path = disks.prepare(tmp_path / "folder", variant, disks.state(variant, 0, 100))
    medium = Medium(monkeypatch, tmp_path, durable=False)
    toc.save(disks.state(variant, 1, 100), path, durable=False, **disks.VARIANTS[variant])
    assert [event for event in medium.events if "synced" in event[0]] == []


def test_an_entry_of_a_manager_is_on_the_medium_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    setup = plain()
    manager = toc.CheckpointManager(folder)
    medium = Medium(monkeypatch, tmp_path)
    for step in (1, 2):
        manager.save(step, setup.model, setup.optimizer)
    assert medium.events
    medium.check(folder)


def test_an_inference_model_is_on_the_medium_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = toc.OrtModule(ADAMW, engine="torch")
    medium = Medium(monkeypatch, tmp_path)
    model.export_inference(folder / "model.onnx", ["logits"])
    medium.check(folder)


@pytest.mark.ort
def test_artifacts_are_on_the_medium_before_they_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "artifacts"
    folder.mkdir()
    medium = Medium(monkeypatch, tmp_path)
    for overwrite in (False, True):
        toc.export_artifacts(torch.nn.Linear(3, 2), torch.randn(4, 3), folder, loss="mse", overwrite=overwrite)
        medium.check(folder)
