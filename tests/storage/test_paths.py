"""What is given as a path: anything that is none is an error of ours, everywhere; so is a file or folder that may not be read."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.truth import Truth
from torch_ort_ckpt import report
from torch_ort_ckpt.operations import convert as conversion
from torch_ort_ckpt.operations import summarize as summary
from torch_ort_ckpt.report.comparison import comparison
from torch_ort_ckpt.report.inspection import inspection

FOLDER = Truth("fbv2_ort1_19_2_adamw_full").folder
GOOD = FOLDER / "checkpoint"
STATE = toc.CheckpointState({"w": torch.ones(2)})


class Bytes(os.PathLike[bytes]):
    def __fspath__(self) -> bytes:
        return b"x"


NO_PATHS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: b"checkpoint",
    "bytearray": lambda: bytearray(b"checkpoint"),
    "a path of bytes": Bytes,
    "nothing": lambda: None,
    "a number": lambda: 5,
    "an open file": lambda: GOOD.open("rb"),
    "a buffer": lambda: io.BytesIO(b"x"),
    "a dictionary": lambda: {"w": torch.ones(2)},
    "a zero inside": lambda: "check\0point",
}

TAKE_PATHS: dict[str, Callable[[Any, Path], Any]] = {
    "load": lambda path, t: toc.load(path),
    "load with a format": lambda path, t: toc.load(path, format="ort"),
    "load of ranks": lambda path, t: toc.load([path]),
    "detect": lambda path, t: toc.detect(path),
    "save": lambda path, t: toc.save(STATE, path),
    "save as dcp": lambda path, t: toc.save(STATE, path, format="dcp"),
    "save as safetensors": lambda path, t: toc.save(STATE, path, format="safetensors"),
    "save of nothing": lambda path, t: toc.save(None, path),  # type: ignore[arg-type]
    "convert from": lambda path, t: toc.convert(path, t / "a.pt"),
    "convert to": lambda path, t: toc.convert(GOOD, path),
    "convert to a format": lambda path, t: toc.convert(GOOD, path, to_format="ort"),
    "verify": lambda path, t: toc.verify(path),
    "merge": lambda path, t: toc.merge(path),
    "merge of several": lambda path, t: toc.merge([path, path]),
    "average": lambda path, t: toc.average([path, GOOD]),
    "diff": lambda path, t: toc.diff(path, GOOD),
    "the other side of diff": lambda path, t: toc.diff(GOOD, path),
    "summarize": lambda path, t: summary.summarize(path),
    "inspection": lambda path, t: inspection(path),
    "comparison": lambda path, t: comparison(path, GOOD),
    "a report": lambda path, t: report.write({}, path),
    "a name map": lambda path, t: conversion.read_name_map(path),
    "a plan": lambda path, t: toc.PartitionPlan.from_json(path),
    "artifacts": lambda path, t: toc.Artifacts.load(path),
    "a module": lambda path, t: toc.OrtModule(path, engine="torch"),
    "a session": lambda path, t: toc.TrainingSession(path),
    "a torch module": lambda path, t: toc.to_torch_module(path),
    "stages": lambda path, t: toc.pipeline_stages(path, 2),
    "export": lambda path, t: toc.export_artifacts(nn.Linear(2, 2), torch.ones(1, 2), path),
    "a manager": lambda path, t: toc.CheckpointManager(path),
}
MAY_BE_LEFT_OUT: dict[str, Callable[[Any, Path], Any]] = {
    "the checkpoint of artifacts": lambda path, t: toc.Artifacts.load(FOLDER, checkpoint=path),
    "the source of a module": lambda path, t: toc.to_torch_module(FOLDER, source=path),
    "checkpoints of a runner": lambda path, t: toc.RunnerConfig(num_train_steps=1, checkpoints_dir=path),
    "the start of a runner": lambda path, t: toc.RunnerConfig(num_train_steps=1, checkpoint_to_load_path=path),
    "the logs of a runner": lambda path, t: toc.RunnerConfig(num_train_steps=1, log_dir=path),
}
MAPPINGS = ("a plan",)


@pytest.mark.parametrize("what", NO_PATHS)
@pytest.mark.parametrize("function", {**TAKE_PATHS, **MAY_BE_LEFT_OUT})
def test_what_is_no_path_is_our_error(function: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (what == "nothing" and function in MAY_BE_LEFT_OUT) or (what == "a dictionary" and function in MAPPINGS):
        pytest.skip("means something here")
    monkeypatch.chdir(tmp_path)
    value = NO_PATHS[what]()
    try:
        with pytest.raises(toc.CheckpointError, match=r"path|zero") as caught:
            {**TAKE_PATHS, **MAY_BE_LEFT_OUT}[function](value, tmp_path)
    finally:
        if hasattr(value, "close"):
            value.close()
    assert str(caught.value)
    assert caught.value.remedy
    assert os.listdir(tmp_path) == []


def test_paths_of_a_module() -> None:
    module = toc.OrtModule(FOLDER, engine="torch")
    for make in (b"x", io.BytesIO(), 5, None):
        with pytest.raises(toc.CheckpointError, match="path"):
            module.export_inference(make)  # type: ignore[arg-type]
        with pytest.raises(toc.CheckpointError, match="path"):
            module.load_checkpoint(make)  # type: ignore[arg-type]


def test_paths_of_every_kind_are_taken(tmp_path: Path) -> None:
    (tmp_path / "имя \udcff").mkdir()
    toc.save(STATE, tmp_path / "имя \udcff" / "a")
    assert toc.load(str(tmp_path / "имя \udcff" / "a")) == STATE
    assert toc.load(next(os.scandir(tmp_path / "имя \udcff"))) == STATE


# Permissions


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everyone may enter; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for place in folder.rglob("*"):
        place.chmod(0o755)
    shutil.rmtree(folder)


def as_nobody(action: Callable[[], Any]) -> Any:
    """What the action returns in a process that is not root's (root may read anything)."""
    reading, writing = os.pipe()
    if not hasattr(os, "fork"):
        pytest.skip("Windows has no other user to become")
    child = os.fork()
    if not child:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            try:
                found = action()
            except BaseException as error:
                found = f"{type(error).__name__}: {error}"
            os.write(writing, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        content = file.read()
    os.waitpid(child, 0)
    return json.loads(content)


def outcome(action: Callable[[], Any]) -> str:
    try:
        action()
    except toc.CheckpointError as error:
        return f"ours: {error}" if error.path else f"ours, without a path: {error}"
    return "went well"


@pytest.mark.parametrize("format", ["ort", "safetensors", "runner", "pbseq", "ortcp", "torch", "dcp"])
@pytest.mark.parametrize("closed", ["the file", "the folder above"])
def test_what_may_not_be_read_is_our_error(format: str, closed: str, open_folder: Path) -> None:
    if format == "ortcp":
        pytest.importorskip("h5py")
    place = open_folder / "above" / "checkpoint"
    place.parent.mkdir()
    toc.save(STATE, place, format=format)
    assert toc.load(place, format=format) == STATE  # imports what is needed
    toc.verify(place, format=format)
    files = [place] if closed == "the file" and place.is_file() else [item for item in place.rglob("*") if item.is_file()]
    for item in files if closed == "the file" else [place.parent]:
        item.chmod(0)
    for known in (None, format):
        found = as_nobody(lambda known=known: outcome(lambda: toc.load(place, format=known)))  # type: ignore[misc]
        assert found.startswith("ours: /"), found
    if closed == "the file":
        assert "ermission" in found
    assert as_nobody(lambda: bool(toc.verify(place))) is False
    for mode in (stat.S_IRUSR, 0):  # a folder that may be listed but not entered
        place.parent.chmod(mode)
        assert as_nobody(lambda: outcome(lambda: toc.detect(place))).startswith("ours: /")
    place.parent.chmod(0o755)


@pytest.mark.parametrize("name", ["model.onnx", "x.ort.pt", "x.pt", "x.safetensors", "x"])
def test_unreadable_files_of_any_name_are_our_error(name: str, open_folder: Path) -> None:
    place = open_folder / name
    place.write_bytes(b"content")
    with pytest.raises(toc.CheckpointError):
        toc.load(place)
    place.chmod(0)
    found = as_nobody(lambda: outcome(lambda: toc.load(place)))
    assert found.startswith("ours: /"), found
    assert "ermission" in found
    found = as_nobody(lambda: outcome(lambda: toc.load(open_folder)))
    assert found.startswith("ours: /"), found


def test_artifacts_that_may_not_be_read_are_our_error(open_folder: Path) -> None:
    shutil.copytree(FOLDER, open_folder / "artifacts")
    assert toc.Artifacts.load(open_folder / "artifacts").training is not None
    (open_folder / "artifacts" / "training_model.onnx").chmod(0)
    found = as_nobody(lambda: outcome(lambda: toc.Artifacts.load(open_folder / "artifacts").training))
    assert found.startswith("ours: /"), found
    (open_folder / "artifacts").chmod(0)
    found = as_nobody(lambda: outcome(lambda: toc.Artifacts.load(open_folder / "artifacts")))
    assert found.startswith("ours: /"), found
