"""The four artifacts are one set: replaced together, on request only, and whole after a crash at any moment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import torch_ort_ckpt as toc
from torch_ort_ckpt.graphs.artifact_set import current_files, pending_set

FILES = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")


def owns(name: str) -> bool:
    return name in (*FILES, "nominal_checkpoint")


def write(folder: Path, content: str, names: tuple[str, ...] = FILES, overwrite: bool = False) -> None:
    with pending_set(folder, owns, overwrite=overwrite) as pending:
        for name in names:
            (pending.path / name).write_text(content)
        pending.commit(names)


def content(folder: Path) -> dict[str, str]:
    return {name: place.read_text() for name, place in current_files(folder).items()}


def test_existing_artifacts_are_replaced_only_on_request(tmp_path: Path) -> None:
    write(tmp_path, "old")
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(toc.CheckpointError, match=r"already holds artifacts \(checkpoint, eval_model.onnx"):
        write(tmp_path, "new")
    assert set(content(tmp_path).values()) == {"old", "mine"}
    write(tmp_path, "new", FILES[:2], overwrite=True)
    assert content(tmp_path) == {"training_model.onnx": "new", "eval_model.onnx": "new", "mine.txt": "mine"}
    assert sorted(os.listdir(tmp_path)) == ["eval_model.onnx", "mine.txt", "training_model.onnx"]


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        with pending_set(folder, owns, overwrite=False) as pending:
            (pending.path / "checkpoint").write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == []
    (tmp_path / "there").mkdir()
    with pytest.raises(toc.CheckpointError, match="untouched"), pending_set(tmp_path / "there", owns, overwrite=False):
        raise OSError(28, "No space left on device")
    assert os.listdir(tmp_path / "there") == []


def killed_at(moment: int, folder: Path) -> bool:
    """Write a new set in a child that ends at its `moment`-th change of the file system; returns whether it was killed."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    calls = 0

    def killing(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **keywords: object) -> object:
            nonlocal calls
            calls += 1
            if calls == moment:
                os._exit(9)
            return original(*args, **keywords)

        return call

    for name in ("rename", "replace", "fsync", "unlink", "mkdir", "rmdir"):
        setattr(os, name, killing(getattr(os, name)))
    try:
        write(folder, "new", ("training_model.onnx", "eval_model.onnx", "checkpoint"), overwrite=True)
    finally:
        os._exit(0)


@pytest.mark.filterwarnings("ignore::torch_ort_ckpt.CheckpointWarning")
def test_a_kill_at_any_moment_leaves_the_old_set_or_the_new_one(tmp_path: Path) -> None:
    seen = set()
    for moment in range(1, 100):
        folder = tmp_path / str(moment)
        write(folder, "old")
        killed = killed_at(moment, folder)
        found = content(folder)
        assert found in (dict.fromkeys(FILES, "old"), dict.fromkeys(("training_model.onnx", "eval_model.onnx", "checkpoint"), "new"))
        seen.add(found["checkpoint"])
        write(folder, "later", overwrite=True)
        assert content(folder) == dict.fromkeys(FILES, "later")
        assert sorted(os.listdir(folder)) == sorted(FILES)
        if not killed:
            break
    assert not killed
    assert seen == {"old", "new"}


def test_folders_of_others_are_not_read_or_deleted(tmp_path: Path) -> None:
    foreign = tmp_path / ".artifacts.123-0123abcd.commit"
    foreign.mkdir()
    (foreign / "checkpoint").write_text("theirs")
    (foreign / "set.json").write_text('{"files": ["checkpoint"], "replaces": []}')  # only the marker proves that a folder is ours
    write(tmp_path, "ours")
    assert content(tmp_path) == dict.fromkeys(FILES, "ours")
    assert (foreign / "checkpoint").read_text() == "theirs"
