"""Only what carries this library's marker is deleted or replaced: at start-up, by rotation, by a save, and for Lightning."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from tests.training.setups import files_of, plain
from torch_ort_ckpt.storage.ownership import MARKER, write_marker
from torch_ort_ckpt.training import directory
from torch_ort_ckpt.training.entry import read_entry

MODEL = torch.nn.Linear(2, 2)


def saved(folder: Path, *steps: int, **options: object) -> toc.CheckpointManager:
    manager = toc.CheckpointManager(folder, durable=False, **options)  # type: ignore[arg-type]
    for step in steps:
        manager.save(step, MODEL)
    return manager


def marked(folder: Path, name: str) -> Path:
    """A folder as a killed writer leaves it."""
    folder.mkdir()
    lock = write_marker(folder, name, "123-0123abcd")
    if lock is not None:
        lock.close()
    return folder


def users(folder: Path) -> Path:
    """A folder of the user's."""
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("mine")
    return folder


# Start-up


def test_what_killed_writers_left_is_cleared_and_a_complete_one_recovered(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    os.rename(tmp_path / "checkpoint_2", tmp_path / ".checkpoint_2.123-0123abcd.tmp")
    (marked(tmp_path / ".checkpoint_3.123-0123abcd.tmp", "checkpoint_3") / "checkpoint").write_bytes(b"half")
    marked(tmp_path / ".checkpoint_1.123-0123abcd.old", "checkpoint_1")
    (tmp_path / ".checkpoint_4.123-0123abcd.tmp").mkdir()  # killed before it was marked
    for step, size in ((5, 0), (6, 10), (7, 90)):  # killed while it was marked
        marked(tmp_path / f".checkpoint_{step}.123-0123abcd.tmp", f"checkpoint_{step}")
        os.truncate(tmp_path / f".checkpoint_{step}.123-0123abcd.tmp" / MARKER, size)
    (tmp_path / "notes.txt").write_text("mine")
    assert [entry.step for entry in toc.CheckpointManager(tmp_path).list()] == [1, 2]
    assert files_of(tmp_path) == {"checkpoint_1", "checkpoint_2", "notes.txt"}


@pytest.mark.parametrize(
    "name",
    [
        ".checkpoint_5.mine.old",
        ".checkpoint_5.mine.tmp",
        ".checkpoint_5.0123abcd.old",
        ".checkpoint_5.123-0123abcd.old",
        ".checkpoint_5.123-0123abcd.tmp",
        ".checkpoint_5.123-0123abcd.tmp.lock",
        ".checkpoint_1.123-0123abcd.old",
        ".checkpoint_1.123-0123abcd.tmp",
    ],
)
@pytest.mark.parametrize("kind", ["folder", "file", "link", "foreign marker", "marker for another name"])
def test_start_up_leaves_what_is_not_ours(kind: str, name: str, tmp_path: Path) -> None:
    saved(tmp_path / "run", 1)
    place = tmp_path / "run" / name
    if kind == "file":
        place.write_text("mine")
    elif kind == "link":
        place.symlink_to(marked(tmp_path / "elsewhere", "checkpoint_5"))
    elif kind == "marker for another name":
        (marked(place, "checkpoint_7") / "thesis.txt").write_text("mine")
    else:
        users(place)
        if kind == "foreign marker":
            (place / MARKER).write_text("my own file of this name")
    toc.CheckpointManager(tmp_path / "run")
    assert os.path.lexists(place)
    assert files_of(tmp_path / "run") == {"checkpoint_1", name}
    if kind == "link":
        assert files_of(tmp_path / "elsewhere") == {MARKER}


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    with directory.pending_entry(tmp_path, 3) as pending:
        toc.CheckpointManager(tmp_path)
        assert pending.path.exists()
    assert not pending.path.exists()


def test_a_complete_temporary_with_damage_is_not_promoted(tmp_path: Path) -> None:
    """Sizes are right, the bytes are not."""
    saved(tmp_path, 1, 2)
    data = bytearray((tmp_path / "checkpoint_2" / "checkpoint").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "checkpoint_2" / "checkpoint").write_bytes(data)
    os.rename(tmp_path / "checkpoint_2", tmp_path / ".checkpoint_2.123-0123abcd.tmp")
    assert [entry.step for entry in toc.CheckpointManager(tmp_path).list()] == [1]


def test_what_was_set_aside_comes_back_when_its_successor_did_not_arrive(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    os.rename(tmp_path / "checkpoint_2", tmp_path / ".checkpoint_2.123-0123abcd.old")
    assert [entry.step for entry in toc.CheckpointManager(tmp_path).list()] == [1, 2]
    assert files_of(tmp_path) == {"checkpoint_1", "checkpoint_2"}


# Rotation and saves


def test_rotation_leaves_a_users_folder(tmp_path: Path) -> None:
    users(tmp_path / "checkpoint_1")
    manager = toc.CheckpointManager(tmp_path, max_num_checkpoints=1, durable=False)
    with pytest.warns(toc.CheckpointWarning, match="checkpoint_1 is kept"):
        manager.save(2, MODEL)
    manager.save(3, MODEL)  # the warning is given once
    assert files_of(tmp_path) == {"checkpoint_1", "checkpoint_3"}
    assert files_of(tmp_path / "checkpoint_1") == {"thesis.txt"}


def test_rotation_leaves_an_entry_that_a_user_put_something_into(tmp_path: Path) -> None:
    manager = saved(tmp_path, 1, max_num_checkpoints=1)
    (tmp_path / "checkpoint_1" / "notes.txt").write_text("mine")
    with pytest.warns(toc.CheckpointWarning, match=r"files that are not part of a checkpoint \(notes.txt\)"):
        manager.save(2, MODEL)
    assert (tmp_path / "checkpoint_1" / "notes.txt").read_text() == "mine"
    read_entry(tmp_path / "checkpoint_1").verify()


@pytest.mark.parametrize("kind", ["folder", "file", "link", "notes"])
def test_a_save_replaces_nothing_of_a_users(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "run" / "checkpoint_1"
    manager = toc.CheckpointManager(tmp_path / "run")
    if kind == "folder":
        users(place)
    elif kind == "file":
        place.write_text("mine")
    elif kind == "link":
        place.symlink_to(users(tmp_path / "elsewhere"))
    else:
        manager.save(1, MODEL)
        (place / "notes").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(toc.CheckpointError, match=r"checkpoint_1: can't be replaced by a checkpoint: .* Move it away"):
        manager.save(1, MODEL)
    assert sorted(tmp_path.rglob("*")) == before
    assert manager.last_saved is None


def test_a_deletion_that_is_cut_short_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marker is deleted last, so that what is left after a crash is still recognized as ours."""
    real, left = os.unlink, 0

    def unlink(*args: object, **more: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(*args, **more)  # type: ignore[arg-type]

    for count in range(20):
        run = tmp_path / str(count)
        saved(run, 1, 2)
        left = count
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", unlink)
            directory.remove(run / "checkpoint_1", "checkpoint_1")
        complete = files_of(run) == {"checkpoint_2"}
        toc.CheckpointManager(run)
        assert files_of(run) == {"checkpoint_2"} or (count == 0 and files_of(run) == {"checkpoint_1", "checkpoint_2"})
        if complete:
            break
    assert complete
    assert count > 5


# Lightning


def lightning_checkpoint(step: int) -> dict[str, object]:
    return {"state_dict": {"w": torch.full((3,), float(step))}, "global_step": step, "epoch": 0}


def test_lightning_replaces_its_own_files_and_folders_only(tmp_path: Path) -> None:
    from torch_ort_ckpt.integrations.lightning import read_lightning, write_lightning

    place = tmp_path / "last.ckpt"
    place.write_text("a checkpoint of Lightning's own")
    for step in (1, 2):
        write_lightning(lightning_checkpoint(step), place)
        assert read_lightning(place)["global_step"] == step
    shutil.copytree(place, tmp_path / "copy.ckpt")
    write_lightning(lightning_checkpoint(3), tmp_path / "copy.ckpt")
    with pytest.raises(toc.CheckpointError, match="can't be replaced by a checkpoint"):
        write_lightning(lightning_checkpoint(3), users(tmp_path / "mine"))
    assert files_of(tmp_path) == {"last.ckpt", "copy.ckpt", "mine"}
    assert files_of(tmp_path / "mine") == {"thesis.txt"}


def test_lightning_removes_checkpoints_only(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from torch_ort_ckpt.integrations.lightning import classes, write_lightning

    io = classes("lightning")[0]()
    write_lightning(lightning_checkpoint(1), tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").write_text("a checkpoint of Lightning's own")
    for name in ("a.ckpt", "b.ckpt", "missing.ckpt"):
        io.remove_checkpoint(str(tmp_path / name))
    with pytest.warns(toc.CheckpointWarning, match="mine is kept"):
        io.remove_checkpoint(str(users(tmp_path / "mine")))
    assert files_of(tmp_path) == {"mine"}
    assert files_of(tmp_path / "mine") == {"thesis.txt"}


@pytest.mark.parametrize("complete", [False, True])
def test_lightning_finds_a_checkpoint_whose_save_was_killed_between_its_renames(complete: bool, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from torch_ort_ckpt.integrations.lightning import classes, write_lightning

    place, temporary = tmp_path / "last.ckpt", tmp_path / ".last.ckpt.123-89abcdef.tmp"
    write_lightning(lightning_checkpoint(2), place)
    os.rename(place, tmp_path / "two")
    write_lightning(lightning_checkpoint(1), place)
    os.rename(place, tmp_path / ".last.ckpt.123-0123abcd.old")
    os.rename(tmp_path / "two", temporary)
    if not complete:
        (temporary / "checkpoint").write_bytes(b"")
    found = classes("lightning")[0]().load_checkpoint(str(place))
    assert found["global_step"] == 1 + complete
    assert files_of(tmp_path) == {"last.ckpt"}


def test_the_optimizer_file_of_another_format_stays(tmp_path: Path) -> None:
    """`OrtCheckpoint` removes what it wrote: for format "ort" that is not `<name>.optimizer.safetensors`."""
    pytest.importorskip("lightning")
    from types import SimpleNamespace

    from torch_ort_ckpt.integrations.lightning import classes

    for format, own in (
        ("ort", {"x.ortckpt", "x.ortckpt.data"}),
        ("safetensors", {"x.safetensors", "x.optimizer.safetensors"}),
    ):
        everything = {"x.ortckpt", "x.ortckpt.data", "x.safetensors", "x.optimizer.safetensors", "x.optimizer.txt"}
        for name in everything:
            (tmp_path / name).write_text("")
        callback = classes("lightning")[1](dirpath=tmp_path, format=format)
        callback._remove_checkpoint(SimpleNamespace(is_global_zero=True), str(tmp_path / min(own, key=len)))
        assert files_of(tmp_path) == everything - own


def test_metrics_and_steps_that_an_entry_can_not_hold_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    manager, setup = toc.CheckpointManager(tmp_path), plain()
    for metrics in ({"\ud800": 1.0}, {"loss": 10**400}, {"loss": "low"}, {3: 1.0}, {"loss": torch.ones(2)}):
        with pytest.raises(toc.CheckpointError, match="metrics"):
            manager.save(1, setup.model, metrics=metrics)  # type: ignore[arg-type]
    for step in (-1, 2.0, "2", None, 2**63):
        with pytest.raises(toc.CheckpointError, match="step"):
            manager.save(step, setup.model)  # type: ignore[arg-type]
    assert files_of(tmp_path) == set()
