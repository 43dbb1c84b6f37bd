"""`CheckpointManager`: what is kept, what is restored, what a damaged or half-written entry does."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_ort_ckpt as toc
from tests.training.setups import Setup, assert_equal, data_for, files_of, graph, plain
from torch_ort_ckpt.training.feed import Feed

KINDS = [plain, pytest.param(graph, marks=pytest.mark.ort)]


def steps_of(manager: toc.CheckpointManager) -> list[int]:
    return [entry.step for entry in manager.list()]


def save(manager: toc.CheckpointManager, step: int, setup: Setup, **more: Any) -> None:
    manager.save(step, setup.model, setup.optimizer, scheduler=setup.scheduler, **more)


def train(setup: Setup, feed: Feed, micro_steps: int, window: int = 1, done: int = 0) -> None:
    for number in range(done, done + micro_steps):
        (setup.loss(next(feed)) / window).backward()
        if (number + 1) % window == 0:
            setup.optimizer.step()
            setup.optimizer.zero_grad()
            setup.scheduler.step()


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("stop", [5, 7, 10, 14], ids=lambda n: f"after_{n}")
@pytest.mark.parametrize("make", KINDS)
def test_a_resumed_run_equals_the_uninterrupted_one(make: Callable[..., Setup], stop: int, shuffled: bool, tmp_path: Path) -> None:
    """Stops inside an accumulation window (5, 7), at the end of an epoch (10) and in the middle of the second (14)."""
    setup = make(1)
    feed = Feed(data_for(setup, shuffle=shuffled))
    train(setup, feed, 20, window=2)
    expected = setup.parameters(), random.random(), np.random.rand(), torch.rand(1)

    random.seed(3), np.random.seed(3)
    first = make(1)
    random.seed(3), np.random.seed(3)
    feed = Feed(data_for(first, shuffle=shuffled))
    train(first, feed, stop, window=2)
    manager = toc.CheckpointManager(tmp_path)
    manager.save(stop, first.model, first.optimizer, scheduler=first.scheduler, data=feed, gradients=True)

    second = make(99)
    random.seed(77), np.random.seed(77)
    feed = Feed(data_for(second, shuffle=shuffled))
    entry = toc.CheckpointManager(tmp_path).restore(second.model, second.optimizer, scheduler=second.scheduler, data=feed)
    assert entry is not None
    assert entry.step == stop
    train(second, feed, 20 - stop, window=2, done=stop)
    assert_equal(expected[0], second.parameters())
    assert second.optimizer.param_groups[0]["lr"] == setup.optimizer.param_groups[0]["lr"]
    assert torch.equal(expected[3], torch.rand(1))


def test_python_and_numpy_generators_go_on(tmp_path: Path) -> None:
    setup, manager = plain(), toc.CheckpointManager(tmp_path)
    save(manager, 1, setup)
    expected = random.random(), np.random.rand()
    manager.restore(setup.model, setup.optimizer, scheduler=setup.scheduler)
    assert (random.random(), np.random.rand()) == expected


@pytest.mark.ort
@pytest.mark.parametrize("make", [plain, graph])
def test_the_file_inside_is_an_ordinary_ort_checkpoint(make: Callable[..., Setup], tmp_path: Path) -> None:
    from onnxruntime.training import api

    setup = make()
    train(setup, Feed(data_for(setup)), 3)
    manager = toc.CheckpointManager(tmp_path)
    save(manager, 3, setup, progress={"epoch": 0, "weight_updates": 3})
    entry = manager.latest()
    assert entry is not None
    loaded = api.CheckpointState.load_checkpoint(str(entry.checkpoint))
    for name, value in loaded.parameters:
        if value.data.dtype == np.float32:
            assert np.array_equal(value.data, setup.parameters()[name].numpy())
    assert loaded.properties["training.weight_updates"] == 3
    state = toc.load(entry.checkpoint)
    assert state.optimizer["group0"].step == (3 if make is plain else state.step)
    assert all({"momentum0", "momentum1"} == states.keys() for states in state.optimizer["group0"].states.values())
    # Nothing is stored twice: beside the ORT file there are only the generators, steps and the like.
    beside = sum(record.size for name, record in entry.files.items() if name != "checkpoint")
    assert beside < 64 * 1024


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, centered=True),
        lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 0.01}, {"params": p[2:]}], lr=0.1),
    ],
    ids=["adagrad", "nesterov", "amsgrad", "rmsprop", "groups"],
)
def test_any_optimizer_of_torch_resumes(make: Callable[[list[Any]], torch.optim.Optimizer], tmp_path: Path) -> None:
    def setup(seed: int) -> Setup:
        found = plain(seed)
        found.optimizer = make(list(found.model.parameters()))
        found.scheduler = torch.optim.lr_scheduler.MultiStepLR(found.optimizer, [2, 4])
        return found

    a = setup(0)
    feed = Feed(data_for(a))
    train(a, feed, 3)
    manager = toc.CheckpointManager(tmp_path)
    save(manager, 3, a, data=feed)
    train(a, feed, 5)
    b = setup(1)
    feed = Feed(data_for(b))
    manager.restore(b.model, b.optimizer, scheduler=b.scheduler, data=feed)
    train(b, feed, 5)
    assert_equal(a.parameters(), b.parameters())


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    setup = plain()
    manager = toc.CheckpointManager(tmp_path, max_num_checkpoints=2, keep_best="loss")
    for step, loss in enumerate([0.5, 0.1, 0.9, float("nan"), 0.3, 0.4], start=1):
        save(manager, step, setup, metrics={"loss": loss})
    assert steps_of(manager) == [2, 5, 6]
    best, latest = manager.best(), manager.latest()
    assert best is not None
    assert best.metrics == {"loss": 0.1}
    assert latest is not None
    assert latest.step == 6
    assert files_of(tmp_path) == {"checkpoint_2", "checkpoint_5", "checkpoint_6"}


def test_highest_is_best_when_asked(tmp_path: Path) -> None:
    manager = toc.CheckpointManager(tmp_path, max_num_checkpoints=1, keep_best="accuracy", mode="max")
    for step, value in enumerate([0.5, 0.8, 0.8, 0.1], start=1):
        save(manager, step, plain(), metrics={"accuracy": value})
    assert steps_of(manager) == [3, 4]


def test_due_counts_weight_updates(tmp_path: Path) -> None:
    manager = toc.CheckpointManager(tmp_path, period=5)
    assert [step for step in range(12) if manager.due(step)] == [5, 10]
    save(manager, 5, plain())
    assert not manager.due(5)


def damage(path: Path, kind: str) -> None:
    if kind == "flip":
        content = bytearray((path / "checkpoint").read_bytes())
        content[len(content) // 2] ^= 4
        (path / "checkpoint").write_bytes(content)
    elif kind == "cut":
        os.truncate(path / "checkpoint", 100)
    elif kind == "no manifest":
        (path / "manifest.json").unlink()
    elif kind == "half a manifest":
        (path / "manifest.json").write_text((path / "manifest.json").read_text()[:50])
    elif kind == "lost file":
        (path / "training.json").unlink()
    elif kind == "swapped sectors":
        content = bytearray((path / "checkpoint").read_bytes())
        content[:4096], content[4096:8192] = content[4096:8192], content[:4096]
        (path / "checkpoint").write_bytes(content)


@pytest.mark.parametrize("kind", ["flip", "cut", "no manifest", "half a manifest", "lost file"])
def test_a_damaged_latest_entry_falls_back_with_a_warning(kind: str, tmp_path: Path) -> None:
    setup, manager = plain(), toc.CheckpointManager(tmp_path, max_num_checkpoints=2)
    feed = Feed(data_for(setup))
    for step in (1, 2):
        train(setup, feed, 1)
        save(manager, step, setup, progress={"updates": step})
        if step == 1:
            expected = setup.parameters()
    damage(tmp_path / "checkpoint_2", kind)
    other, progress = plain(5), {}
    again = toc.CheckpointManager(tmp_path, max_num_checkpoints=2)
    with pytest.warns(toc.CheckpointWarning, match="skipping a damaged"):
        entry = again.restore(other.model, other.optimizer, scheduler=other.scheduler, progress=progress)
    assert entry is not None
    assert (entry.step, progress) == (1, {"updates": 1})
    assert_equal(expected, other.parameters())
    save(again, 2, setup)  # takes the damaged one's place
    assert again.latest().step == 2  # type: ignore[union-attr]
    assert files_of(tmp_path) == {"checkpoint_1", "checkpoint_2"}


def test_all_damaged_means_starting_anew(tmp_path: Path) -> None:
    manager = toc.CheckpointManager(tmp_path)
    save(manager, 1, plain())
    damage(tmp_path / "checkpoint_1", "flip")
    other = plain()
    with pytest.warns(toc.CheckpointWarning, match="skipping"):
        assert manager.restore(other.model, other.optimizer) is None


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    from torch_ort_ckpt.training.directory import pending_entry

    with pending_entry(tmp_path, 3) as pending:
        toc.CheckpointManager(tmp_path)
        assert pending.path.exists()
    assert not pending.path.exists()


def test_two_managers_share_a_directory(tmp_path: Path) -> None:
    a, b = (toc.CheckpointManager(tmp_path, max_num_checkpoints=2, async_save=True) for _ in range(2))
    for step in range(1, 8):
        save(a, step, plain(step))
        save(b, step, plain(step))
    a.close(), b.close()
    assert steps_of(a) == [6, 7]
    for entry in a.list():
        entry.verify()
    assert files_of(tmp_path) == {"checkpoint_6", "checkpoint_7"}


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    manager = toc.CheckpointManager(tmp_path)
    for seed in (1, 2):
        save(manager, 7, plain(seed))
    other = plain(9)
    manager.restore(other.model, other.optimizer, scheduler=other.scheduler)
    assert_equal(plain(2).parameters(), other.parameters())
    assert files_of(tmp_path) == {"checkpoint_7"}


def test_async_save_writes_what_was_there_at_the_call(tmp_path: Path) -> None:
    setup = plain()
    with toc.CheckpointManager(tmp_path, async_save=True) as manager:
        expected = setup.parameters()
        save(manager, 1, setup)
        with torch.no_grad():
            for parameter in setup.model.parameters():
                parameter.fill_(7)
    other = plain(3)
    manager.restore(other.model, other.optimizer, scheduler=other.scheduler)
    assert_equal(expected, other.parameters())


@pytest.mark.parametrize("background", [False, True])
def test_an_error_surfaces_and_earlier_entries_stay(background: bool, tmp_path: Path) -> None:
    setup = plain()
    manager = toc.CheckpointManager(tmp_path / "m", max_num_checkpoints=1, async_save=background)
    save(manager, 1, setup)
    manager.wait()
    (tmp_path / "m").rename(tmp_path / "away")
    if background:
        save(manager, 2, setup)  # fails in the background
    with pytest.raises(toc.CheckpointError, match="can't be written"):
        save(manager, 3, setup)
    (tmp_path / "away").rename(tmp_path / "m")
    assert steps_of(manager) == [1]
    save(manager, 4, setup)
    manager.wait()
    assert steps_of(manager) == [4]


def test_a_run_may_go_on_without_the_save(tmp_path: Path) -> None:
    manager = toc.CheckpointManager(tmp_path / "m", on_error="warn")
    (tmp_path / "m").rmdir()
    setup = plain()
    with pytest.warns(toc.CheckpointWarning, match="training continues"):
        assert manager.save(1, setup.model, setup.optimizer) is None


def test_sigterm_is_noted_while_open(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with toc.CheckpointManager(tmp_path) as manager:
        assert not manager.preempted()
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.preempted()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("options", [{"period": 0}, {"max_num_checkpoints": 0}, {"mode": "median"}, {"on_error": "ignore"}])
def test_impossible_settings_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match=next(iter(options))):
        toc.CheckpointManager(tmp_path, **options)


def test_an_entry_of_another_model_is_refused(tmp_path: Path) -> None:
    manager = toc.CheckpointManager(tmp_path)
    save(manager, 1, plain())
    other = torch.nn.Linear(2, 2)
    with pytest.raises(toc.CheckpointError, match="does not fit"):
        manager.restore(other, torch.optim.AdamW(other.parameters()))


def test_what_would_need_pickling_is_refused(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"inner": [1, object()]}

    with pytest.raises(toc.CheckpointError, match=r"data/inner/1: a builtins\.object"):
        save(toc.CheckpointManager(tmp_path), 1, plain(), data=Odd())
