"""A failed save is due again, and the last one of a run is retried."""

from __future__ import annotations

import errno
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

import torch_ort_ckpt as toc
from tests.training.setups import assert_equal, data, files_of, plain
from torch_ort_ckpt.training import manager as managers
from torch_ort_ckpt.training.runner import Event, Result


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """How many saves of each step still fail, as on a full disk."""
    failures: dict[int, int] = {}
    real = managers.write_manifest

    def write_manifest(folder: Path, step: int, *args: Any, **more: Any) -> None:
        if failures.get(step, 0) > 0:
            failures[step] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(folder, step, *args, **more)

    monkeypatch.setattr(managers, "write_manifest", write_manifest)
    return failures


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_is_due_again(background: bool, full_disk: dict[int, int], tmp_path: Path) -> None:
    setup = plain()
    manager = toc.CheckpointManager(tmp_path, period=2, on_error="warn", async_save=background)
    full_disk[2] = 1
    assert manager.due(2)
    with warnings.catch_warnings(record=True, action="always") as told:
        manager.save(2, setup.model, setup.optimizer)
        assert manager.due(2) is not background  # in the background it is not known yet, and not begun twice
        manager.wait()
    assert ["No space left" in str(item.message) for item in told] == [True]
    assert manager.due(2)
    assert manager.last_saved is None
    manager.save(2, setup.model, setup.optimizer)
    assert not manager.due(2)
    manager.wait()
    assert not manager.due(2)
    assert manager.last_saved == 2
    assert files_of(tmp_path) == {"checkpoint_2"}


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_of_a_step_that_was_saved_before_does_not_count_either(
    background: bool, full_disk: dict[int, int], tmp_path: Path
) -> None:
    manager = toc.CheckpointManager(tmp_path, on_error="warn", async_save=background)
    manager.save(2, plain(1).model)
    manager.wait()
    full_disk[2] = 1
    with warnings.catch_warnings(record=True, action="always") as told:
        manager.save(2, plain(2).model)
        manager.wait()
    assert ["No space left" in str(item.message) for item in told] == [True]
    assert manager.last_saved is None
    manager.list()[0].verify()


def test_an_entry_of_another_directory_is_not_saved_in_this_one(tmp_path: Path) -> None:
    toc.CheckpointManager(tmp_path / "a").save(2, plain().model)
    manager = toc.CheckpointManager(tmp_path / "b", period=2)
    manager.restore(plain().model, entry=toc.CheckpointManager(tmp_path / "a").latest())
    assert manager.due(2)


def run(folder: Path, background: bool, term: int | None = None, window: int = 1) -> Result:
    setup = plain()

    def watch(event: Event) -> None:
        if event.kind == "step" and event.step == term:
            os.kill(os.getpid(), signal.SIGTERM)

    config = toc.RunnerConfig(
        6,
        gradient_accumulation_steps=window,
        checkpoints_dir=folder,
        checkpoint_period=2,
        async_save=background,
        on_save_error="warn",
        progress_bar=False,
    )
    runner = toc.TrainingRunner(setup.model, setup.optimizer, config, loss=lambda model, batch: setup.loss(batch), callbacks=[watch])
    return runner.run(data())


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("failures", [1, 2])
def test_the_last_save_of_a_run_is_tried_again(failures: int, background: bool, full_disk: dict[int, int], tmp_path: Path) -> None:
    full_disk[6] = failures
    with pytest.warns(toc.CheckpointWarning, match="was not saved"):
        run(tmp_path, background)
    assert files_of(tmp_path) == {"checkpoint_2", "checkpoint_4", "checkpoint_6"}
    for entry in toc.CheckpointManager(tmp_path).list():
        entry.verify()


@pytest.mark.posix  # on Windows a SIGTERM that is sent ends the process at once
@pytest.mark.parametrize("background", [False, True])
def test_the_save_of_a_preempted_run_is_tried_again(background: bool, tmp_path: Path) -> None:
    """Inside an accumulation window, where an entry of the same step exists already: the newer one has the gradients."""
    run(tmp_path / "whole", False, window=2)

    count = {"saves": 0}
    real = managers.write_manifest

    def write_manifest(folder: Path, step: int, *args: Any, **more: Any) -> None:
        count["saves"] += 1
        if count["saves"] == 2:  # the first is that of the update before
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(folder, step, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(managers, "write_manifest", write_manifest)
        with pytest.warns(toc.CheckpointWarning, match="was not saved"):
            result = run(tmp_path / "run", background, term=5, window=2)
    assert result.preempted
    assert count["saves"] == 3
    resumed = run(tmp_path / "run", background, window=2)
    assert resumed.resumed_from == 5
    states = [toc.CheckpointManager(tmp_path / name).latest().state() for name in ("whole", "run")]  # type: ignore[union-attr]
    assert_equal(dict(states[0].trainable), dict(states[1].trainable))
