"""Checkpoints that are folders: a writer killed at any step leaves the old one or the new one, and nothing that is not ours is deleted."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import warnings
from pathlib import Path

import pytest

import torch_ort_ckpt as toc
from tests import writers
from tests.writers import new, old, repair_folder_and_die, run, save_folder_and_die
from torch_ort_ckpt.storage import folders, ownership

NEVER = 1 << 30


def is_new(path: Path) -> bool:
    return writers.is_new(path, folders.repair)


@pytest.mark.posix  # SIGKILL
@pytest.mark.parametrize("format", ["pbseq", "runner"])
def test_killed_at_every_step(format: str, tmp_path: Path) -> None:
    outcomes = []
    for step in range(1, NEVER):
        folder = tmp_path / f"{step}"
        folder.mkdir()
        toc.save(old(), folder / "checkpoint", format=format, durable=False)
        code = run(save_folder_and_die, folder / "checkpoint", format, step, tmp_path / "journal")
        outcomes.append(is_new(folder / "checkpoint"))
        toc.save(new(), folder / "checkpoint", format=format, durable=False)
        assert os.listdir(folder) == ["checkpoint"]  # what the killed one left is gone
        shutil.rmtree(folder)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert len(outcomes) > 20
    assert outcomes == sorted(outcomes)  # old until the commit, new ever after
    assert (outcomes[0], outcomes[-1]) == (False, True)


def interrupted(path: Path) -> None:
    """As a save that was killed between its two renames leaves things."""
    toc.save(old(), path, format="runner")
    toc.save(new(), path.with_name("other"), format="runner")
    os.rename(path.with_name("other"), path.with_name(f".{path.name}.123-0123abcd.new"))
    os.rename(path, path.with_name(f".{path.name}.123-0123abcd.old"))
    lock = ownership.write_marker(path.with_name(f".{path.name}.123-0123abcd.new"), path.name, "123-0123abcd")
    if lock is not None:
        lock.close()


def test_an_interrupted_save_is_read_with_a_warning_and_repaired_by_verify(tmp_path: Path) -> None:
    interrupted(tmp_path / "checkpoint")
    with pytest.warns(toc.CheckpointWarning, match="interrupted"):
        assert toc.load(tmp_path / "checkpoint") == new()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", toc.CheckpointWarning)
        assert toc.verify(tmp_path / "checkpoint", repair=True).repaired
    assert toc.load(tmp_path / "checkpoint") == new()
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.posix  # SIGKILL
def test_repair_itself_may_be_killed(tmp_path: Path) -> None:
    for step in range(1, NEVER):
        folder = tmp_path / f"{step}"
        folder.mkdir()
        interrupted(folder / "checkpoint")
        code = run(repair_folder_and_die, folder / "checkpoint", step, tmp_path / "journal")
        assert is_new(folder / "checkpoint")
        if code == 0:
            break
    assert step > 3


@pytest.mark.posix  # Windows syncs no folders
def test_bytes_reach_the_medium_before_their_names(tmp_path: Path) -> None:
    """What a power failure needs: files are synced after their last write, then their folder; a sync follows each rename."""
    path = tmp_path / "place" / "checkpoint"
    path.parent.mkdir()
    toc.save(old(), path, format="runner")
    assert run(save_folder_and_die, path, "runner", NEVER, tmp_path / "journal") == 0
    journal = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    renames = [index for index, entry in enumerate(journal) if entry[0] == "rename"]
    last_write = max(index for index, entry in enumerate(journal) if "write" in entry[0])
    synced = [entry[1] for entry in journal[last_write : renames[0]] if entry[0] == "fsync"]
    assert len(renames) == 2
    assert sorted(Path(place).name for place in synced[:3]) == ["properties.pbseq", "tensors.bin", "tensors.pbseq"]
    assert synced[3] == journal[renames[1]][1]  # the new folder itself
    for rename in renames:
        assert ["fsync", str(path.parent)] in [entry[:2] for entry in journal[rename : rename + 4]]


def test_a_folder_with_other_things_in_it_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for format in ("pbseq", "runner"):
        with pytest.raises(toc.CheckpointError, match=r"notes\.txt"):
            toc.save(new(), tmp_path, format=format)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_file_in_the_way_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("mine")
    with pytest.raises(toc.CheckpointError, match="a file exists where"):
        toc.save(new(), tmp_path / "checkpoint", format="pbseq")
    assert (tmp_path / "checkpoint").read_text() == "mine"


@pytest.mark.parametrize("kind", ["new", "old"])
def test_folders_of_others_that_are_named_like_ours_stay(kind: str, tmp_path: Path) -> None:
    """Only a marker proves that a folder is ours; its name does not."""
    toc.save(old(), tmp_path / "c", format="runner")
    theirs = tmp_path / f".c.123-0123abcd.{kind}"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("mine")
    toc.save(new(), tmp_path / "c", format="runner")
    assert not folders.repair(tmp_path / "c")
    assert (theirs / "thesis.txt").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == [theirs.name, "c"]
    assert sorted(os.listdir(tmp_path / "c")) == ["properties.pbseq", "tensors.bin", "tensors.pbseq"]  # and no marker stays


def test_a_marker_made_for_another_name_proves_nothing(tmp_path: Path) -> None:
    toc.save(old(), tmp_path / "c", format="runner")
    theirs = tmp_path / ".c.123-0123abcd.new"
    theirs.mkdir()
    lock = ownership.write_marker(theirs, "other", "123-0123abcd")
    if lock is not None:
        lock.close()
    toc.save(new(), tmp_path / "c", format="runner")
    assert theirs.is_dir()


def test_a_save_after_an_interrupted_one_clears_up_without_repair(tmp_path: Path) -> None:
    interrupted(tmp_path / "checkpoint")
    toc.save(old(), tmp_path / "checkpoint", format="runner")
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_rename_that_fails_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    toc.save(old(), path, format="runner")
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if str(source).endswith(".new"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(toc.CheckpointError, match="what was there before is untouched"):
        toc.save(new(), path, format="runner")
    assert toc.load(path) == old()
    assert os.listdir(tmp_path) == ["c"]


def test_a_failure_after_the_commit_says_that_the_new_folder_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    toc.save(old(), path, format="runner")
    renames = []
    real, sync = os.rename, folders.fsync_directory
    monkeypatch.setattr(os, "rename", lambda *places: (renames.append(places), real(*places)))

    def fail(folder: Path) -> None:
        if len(renames) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(folder)

    monkeypatch.setattr(folders, "fsync_directory", fail)
    with pytest.raises(toc.CheckpointError, match="the new file is in place"):
        toc.save(new(), path, format="runner")
    assert toc.load(path) == new()


def test_files_that_are_no_longer_needed_go_with_the_old_folder(tmp_path: Path) -> None:
    toc.save(new(), tmp_path / "c", format="pbseq")
    toc.save(new(), tmp_path / "c", format="pbseq", include_optimizer=False)
    assert toc.load(tmp_path / "c").optimizer == {}


def test_an_error_while_writing_leaves_what_was_there(tmp_path: Path) -> None:
    toc.save(old(), tmp_path / "c", format="runner")
    strings = toc.CheckpointState(
        frozen={"words": toc.load(Path(__file__).parents[1] / "data/fbv2_ort1_19_2_strings/checkpoint").frozen.popitem()[1]}
    )
    with pytest.raises(toc.CheckpointError):
        toc.save(strings, tmp_path / "c", format="runner")
    assert toc.load(tmp_path / "c") == old()
    assert os.listdir(tmp_path) == ["c"]


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Create the folder first"):
        toc.save(new(), tmp_path / "no" / "c", format="pbseq")
