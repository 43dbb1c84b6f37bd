"""What is different on macOS: syncing, and processes that are spawned."""

from __future__ import annotations

import errno
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc


@pytest.mark.posix
def test_durable_means_past_the_drives_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    asked: list[int] = []
    original = fcntl.fcntl

    def recorded(descriptor: Any, command: int, *argument: Any) -> Any:
        if command != 51:
            return original(descriptor, command, *argument)
        asked.append(command)
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", recorded)
    state = toc.CheckpointState(trainable={"w": torch.ones(2)})
    toc.save(state, tmp_path / "fast", durable=False)
    assert asked == []
    toc.save(state, tmp_path / "one", durable=True)
    assert asked == [51, 51]  # the file, then the folder
    toc.save(state, tmp_path / "folder", format="pbseq", durable=True)
    assert len(asked) > 4


@pytest.mark.posix
def test_a_file_system_without_it_is_synced_as_usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl
    import os

    def refuse(*_: Any) -> Any:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    synced: list[int] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(os, "fsync", synced.append)
    toc.save(toc.CheckpointState(trainable={"w": torch.ones(2)}), tmp_path / "one")
    assert len(synced) == 2


@pytest.mark.posix
def test_a_sync_that_fails_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reports lost bytes once: a second sync succeeds."""
    import fcntl

    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", fail)
    with pytest.raises(toc.CheckpointError, match="Input/output error"):
        toc.save(toc.CheckpointState(trainable={"w": torch.ones(2)}), tmp_path / "one")
    assert not (tmp_path / "one").exists()


def total(path: Path) -> float:
    """In a process of its own."""
    return float(toc.load(path).trainable["w"].sum())


def test_spawned_processes_load_and_save(tmp_path: Path) -> None:
    toc.save(toc.CheckpointState(trainable={"w": torch.ones(3)}), tmp_path / "checkpoint")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(total, (tmp_path / "checkpoint",)) == 3.0
