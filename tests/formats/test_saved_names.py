"""What a destination's name means: its suffix chooses the format, and a sharded save is found under the name it was given."""

from __future__ import annotations

import errno
import inspect
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.disks import failing, write_model
from torch_ort_ckpt.cli import main
from torch_ort_ckpt.formats import exists
from torch_ort_ckpt.formats.safetensors import checkpoint as safetensors

SHARDED = {"max_shard_size": 500}


def state(value: float = 1.0) -> toc.CheckpointState:
    moments = {name: {"momentum0": torch.full((100,), value), "momentum1": torch.full((100,), value)} for name in ("w", "v")}
    return toc.CheckpointState(
        trainable={"w": torch.full((100,), value), "v": torch.full((100,), value + 1)},
        optimizer={"group0": toc.OptimizerGroup(int(value), states=moments)},
    )


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("c", "ort"),
        (".hidden", "ort"),
        ("c.safetensors", "safetensors"),
        ("c.safetensors.index.json", "safetensors"),
        ("c.pt", "torch"),
        ("c.PT", "torch"),
        ("c.pth", "torch"),
        ("c.bin", "torch"),
        ("c.ckpt", "torch"),
        ("v1.5.pt", "torch"),
        ("c.pbseq", "pbseq"),
        ("c.runner", "runner"),
        ("c.ortcp", "ortcp"),
        ("c.dcp", "dcp"),
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_the_suffix_chooses_the_format(name: str, format: str, kind: Callable[[Path], Any], tmp_path: Path) -> None:
    toc.save(state(), kind(tmp_path / name), durable=False)
    assert toc.detect(kind(tmp_path / name)) == format
    assert toc.load(kind(tmp_path / name)) == state()


def test_a_format_that_is_given_wins(tmp_path: Path) -> None:
    toc.save(state(), tmp_path / "c.pt", "ort")
    assert toc.detect(tmp_path / "c.pt") == "ort"
    assert inspect.signature(toc.save).parameters["format"].default is None


@pytest.mark.parametrize("name", ["c.txt", "checkpoint_v1.5", "c.safetensor", "c.data"])
def test_an_unknown_suffix_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match="can't tell a format from this name") as caught:
        toc.save(state(), tmp_path / name)
    assert "format=" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_suffixes_that_ask_for_more(tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match="can be read, not written"):
        toc.save(state(), tmp_path / "c.ort.pt")
    weights = toc.CheckpointState(trainable=state().trainable)
    write_model(tmp_path / "m.onnx", state(5.0))
    toc.save(weights, tmp_path / "m.onnx")
    assert toc.load(tmp_path / "m.onnx") == weights


# Shards


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    toc.save(state(), path, **SHARDED)
    assert not path.exists()
    assert (tmp_path / "m.safetensors.index.json").exists()
    return path


def test_a_sharded_save_is_found_everywhere(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "single.safetensors"
    toc.save(state(), other)
    for path in (sharded, str(sharded)):
        assert toc.detect(path) == "safetensors"
        assert toc.load(path) == toc.load(path, "safetensors") == state()
        assert toc.verify(path)
        assert toc.verify(path, repair=True)
        assert toc.diff(path, other).equal
        assert toc.average([path, other]) == state()
        toc.convert(path, tmp_path / "converted", overwrite=True)
        assert toc.load(tmp_path / "converted") == state()
        assert toc.merge(path) == state()
        assert exists(path)
    for command in (["inspect", str(sharded)], ["verify", str(sharded)], ["diff", str(sharded), str(other)]):
        assert main(command) == 0, capsys.readouterr()


def test_a_sharded_save_is_not_overwritten_unless_asked(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(os.listdir(tmp_path))
    for options in ({}, SHARDED):
        with pytest.raises(toc.CheckpointError, match="exists already"):
            toc.save(state(2.0), sharded, overwrite=False, **options)
    toc.save(state(2.0), tmp_path / "c")
    with pytest.raises(toc.CheckpointError, match="exists already"):
        toc.convert(tmp_path / "c", sharded)
    assert main(["average", str(tmp_path / "c"), "-o", str(sharded)]) != 0
    assert "exists already" in capsys.readouterr().err
    assert toc.load(sharded) == state()
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "c"])


def test_converting_to_shards_is_verified(tmp_path: Path) -> None:
    toc.save(state(), tmp_path / "c")
    toc.convert(tmp_path / "c", tmp_path / "m.safetensors", **SHARDED)
    assert toc.load(tmp_path / "m.safetensors") == state()


def test_artifacts_take_a_sharded_checkpoint(sharded: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "eval_model.onnx", state())
    assert toc.Artifacts.load(tmp_path, checkpoint=sharded).checkpoint_path == sharded


@pytest.mark.parametrize("first", [{}, SHARDED], ids=["single first", "sharded first"])
def test_one_form_replaces_the_other(first: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    toc.save(state(1.0), path, **first)
    toc.save(state(2.0), path, **({} if first else SHARDED))
    assert toc.load(path) == state(2.0)
    assert (tmp_path / "m.safetensors").exists() == bool(first)
    assert (tmp_path / "m.safetensors.index.json").exists() != bool(first)
    toc.save(state(3.0), path, **first)
    assert toc.load(path) == state(3.0)
    assert len([name for name in os.listdir(tmp_path) if "-of-" in name]) == (6 if first else 0)


@pytest.mark.filterwarnings("ignore::torch_ort_ckpt.CheckpointWarning")  # "the last save was interrupted"
def test_a_single_file_that_can_not_be_removed_stays_and_counts(tmp_path: Path) -> None:
    """Shards saved over a single file: as long as the single file exists it is the checkpoint, and the save has failed."""
    path = tmp_path / "m.safetensors"
    toc.save(state(1.0), path, include_optimizer=False)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    seen = set()
    for number in range(1, 1000):
        hit: list[str] = []
        message = None
        try:
            with failing(number, errno.EIO, hit):
                toc.save(state(2.0), path, durable=False, **SHARDED)
        except toc.CheckpointError as error:
            message = str(error)
        if not hit:
            break
        if message is not None:
            new = toc.load(path).step == 2
            assert ("untouched" in message) is not new
            seen.add((hit[0], new))
            if not new:
                assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        for name, content in before.items():
            (tmp_path / name).write_bytes(content)
    assert {("unlink", False), ("replace", False), ("replace", True)} <= seen


def test_a_killed_change_of_form_leaves_one_checkpoint(tmp_path: Path) -> None:
    """An index beside a single file, which a save of shards leaves when it is killed before its commit: the single file is loaded."""
    path = tmp_path / "m.safetensors"
    toc.save(state(2.0), path, **SHARDED)
    toc.save(state(1.0), tmp_path / "other" / "m.safetensors")
    for name in os.listdir(tmp_path / "other"):
        os.rename(tmp_path / "other" / name, tmp_path / name)
    os.unlink(tmp_path / "m.optimizer.safetensors")
    toc.save(state(1.0), tmp_path / "m.safetensors", include_optimizer=False)
    assert toc.load(path) == toc.CheckpointState(trainable=state(1.0).trainable)
    assert sorted(name for name in os.listdir(tmp_path) if name != "other") == ["m.safetensors"]


def test_folders_of_several_checkpoints_do_not_take_parts_for_checkpoints(tmp_path: Path) -> None:
    """`load` of a folder reads one checkpoint, or all ranks: shards and optimizer files belong to their checkpoint."""
    toc.save(state(), tmp_path / "one" / "m.safetensors", **SHARDED)
    assert toc.load(tmp_path / "one") == state()
    assert toc.detect(tmp_path / "one") == "safetensors"
    ranks = toc.split(state(), toc.PartitionPlan(data_parallel_size=2, zero_stage=1))
    for number, rank in enumerate(ranks):
        toc.save(rank, tmp_path / "ranks" / f"rank_{number}.safetensors", **(SHARDED if number else {}))
    assert toc.load(tmp_path / "ranks") == toc.merge(ranks)
    assert safetensors.is_part(tmp_path / "one" / "m-00001-of-00002.safetensors")
    assert not safetensors.is_part(tmp_path / "one" / "m.safetensors.index.json")


@pytest.mark.lightning
def test_lightning_removes_all_files_of_a_checkpoint(tmp_path: Path) -> None:
    from torch_ort_ckpt.integrations.lightning import OrtCheckpoint

    callback = OrtCheckpoint(dirpath=tmp_path, format="safetensors")
    (tmp_path / "mine-00001-of-00002.safetensors").touch()
    for options in ({}, SHARDED):
        toc.save(state(), tmp_path / "epoch=1.safetensors", **options)
        callback._remove_checkpoint(SimpleNamespace(is_global_zero=True), str(tmp_path / "epoch=1.safetensors"))
        assert os.listdir(tmp_path) == ["mine-00001-of-00002.safetensors"]
