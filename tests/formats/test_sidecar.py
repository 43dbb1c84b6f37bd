"""The `.data` file beside a checkpoint: missing, too short, of another checkpoint, or pointing to a file elsewhere."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from tests import refusals
from torch_ort_ckpt.errors import CorruptFileError, MissingFileError
from torch_ort_ckpt.formats.ort import sidecar
from torch_ort_ckpt.formats.ort.flatbuffer import Field

from ..truth import Truth
from .hostile import Fields, checkpoint, group, module, official, states, tensor


@pytest.fixture(params=["ORT's", "ours"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint with its sidecar in a folder of its own."""
    truth = Truth("fbv2_ort1_19_2_external_adamw_full")
    path = tmp_path / "home" / "checkpoint"
    path.parent.mkdir()
    if request.param == "ours":
        toc.save(toc.load(truth.checkpoint), path, external_data=True)
    else:
        shutil.copy(truth.checkpoint, path)
        shutil.copy(f"{truth.checkpoint}.data", f"{path}.data")
    truth.assert_equal(toc.load(path))
    return path


def refused(path: Path, message: str, kind: type[toc.CheckpointError] = toc.CheckpointError) -> toc.CheckpointError:
    return refusals.refused(path, message, kind, at=f"{path}.data")


def test_missing(pair: Path) -> None:
    os.unlink(f"{pair}.data")
    assert "beside the checkpoint" in str(refused(pair, "part of this checkpoint is missing", MissingFileError))


@pytest.mark.parametrize("left", [0, 1, 63, 64, 1000])
def test_too_short(pair: Path, left: int) -> None:
    os.truncate(f"{pair}.data", left)
    refused(pair, "the file ends at|belongs to another save", CorruptFileError)


def test_a_tensor_beyond_the_end_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, [outside("w", 0), outside("x", 8)], bytes(15))
    error = refused(path, "needs bytes 8 to 16, the file ends at 15", CorruptFileError)
    assert error.field == "module_state.requires_grad_params[1] (x)"


def test_not_a_file(pair: Path) -> None:
    os.unlink(f"{pair}.data")
    os.mkdir(f"{pair}.data")
    refused(pair, "not a regular file")
    os.rmdir(f"{pair}.data")
    if hasattr(os, "mkfifo"):
        os.mkfifo(f"{pair}.data")
        refused(pair, "not a regular file")


def test_a_link_elsewhere_is_refused(pair: Path, tmp_path: Path) -> None:
    """An untrusted checkpoint must not make us read (and then save or send) other files of this machine."""
    elsewhere = tmp_path / "secret"
    shutil.move(f"{pair}.data", elsewhere)
    os.symlink(elsewhere, f"{pair}.data")
    refused(pair, "symbolic link to another folder")
    os.unlink(f"{pair}.data")
    os.symlink("../secret", f"{pair}.data")
    refused(pair, "symbolic link to another folder")
    os.symlink(elsewhere, f"{pair}.middle")
    os.unlink(f"{pair}.data")
    os.symlink("checkpoint.middle", f"{pair}.data")
    refused(pair, "symbolic link to another folder")


def test_links_that_lead_nowhere(pair: Path) -> None:
    os.unlink(f"{pair}.data")
    os.symlink("absent", f"{pair}.data")
    refused(pair, "no such file", MissingFileError)
    os.unlink(f"{pair}.data")
    os.symlink("checkpoint.data", f"{pair}.data")
    refused(pair, "can't be opened")


def test_links_as_caches_make_them(pair: Path, tmp_path: Path) -> None:
    """Snapshots whose files are links into one folder of blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    shutil.move(pair.parent, blobs)
    snapshot.mkdir()
    for name in ("checkpoint", "checkpoint.data"):
        os.rename(blobs / name, blobs / f"hash-{name}")
        os.symlink(blobs / f"hash-{name}", snapshot / name)
    Truth("fbv2_ort1_19_2_external_adamw_full").assert_equal(toc.load(snapshot / "checkpoint"))


def test_saving_through_a_link(pair: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest"
    os.symlink(pair, link)
    state = toc.load(link)
    state.properties["again"] = 1
    toc.save(state, link, external_data=True)
    assert link.is_symlink()
    assert toc.load(link) == toc.load(pair) == state
    assert sorted(os.listdir(pair.parent)) == ["checkpoint", "checkpoint.data"]


def test_the_sidecar_of_another_save(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    state = toc.CheckpointState(trainable={"w": torch.zeros(100)})
    toc.save(state, first, external_data=True)
    state.trainable["w"] = torch.ones(100)
    toc.save(state, second, external_data=True)
    shutil.copy(f"{second}.data", f"{first}.data")
    refused(first, "belongs to another save", CorruptFileError)
    refused_by_size = Truth("fbv2_ort1_19_2_external_adamw_full").checkpoint
    shutil.copy(f"{refused_by_size}.data", f"{first}.data")
    refused(first, "belongs to another save", CorruptFileError)


def test_offsets_that_overlap(tmp_path: Path) -> None:
    path = write(tmp_path, [outside("w", 0), outside("x", 4)], bytes(64))
    assert refused(path, "overlaps the data of 'w'", CorruptFileError).field == "x"
    moments = Field(2, "tables", [group(states=[states(b"w", outside("momentum0", 0))])])
    path = write(tmp_path, [outside("w", 0)], bytes(64), moments)
    assert refused(path, "overlaps the data of", CorruptFileError).field in ("w", "momentum0")


@pytest.mark.parametrize("offset", [-2, -(1 << 63)])
def test_negative_offsets(offset: int, tmp_path: Path) -> None:
    path = write(tmp_path, [outside("w", offset)], bytes(64))
    with pytest.raises(CorruptFileError, match="negative offset") as caught:
        toc.load(path)
    assert (caught.value.path, caught.value.field) == (str(path), "module_state.requires_grad_params[0].external_data_offset")


@pytest.mark.parametrize("offset", [57, 1 << 32, (1 << 63) - 1])
def test_offsets_beyond_the_end(offset: int, tmp_path: Path) -> None:
    path = write(tmp_path, [outside("w", offset)], bytes(64))
    assert refused(path, "the file ends at 64", CorruptFileError).field == "module_state.requires_grad_params[0] (w)"


def test_data_in_both_places_or_none(tmp_path: Path) -> None:
    twice = tensor(b"w", (2,), b"\0" * 8, 1, Field(6, "int64", 0))
    for tensors, has_external in (([twice], True), ([outside("w", 0)], False)):
        path = write(tmp_path, tensors, bytes(64), has_external=has_external)
        with pytest.raises(CorruptFileError, match=r"both inline and external|says it has none") as caught:
            toc.load(path)
        assert caught.value.field == "module_state.requires_grad_params[0].external_data_offset"


def test_misaligned_offsets_are_copied(tmp_path: Path) -> None:
    """ORT pads uint64 to 4 bytes only; others may not pad at all."""
    data = bytes(range(64))
    state = toc.load(write(tmp_path, [outside("w", 3), outside("x", 13)], data))
    assert state.trainable["w"].view(torch.uint8).tolist() == list(range(3, 11))
    assert state.trainable["x"].view(torch.uint8).tolist() == list(range(13, 21))


def test_there_is_nothing_to_repair(pair: Path) -> None:
    before = {name: (pair.parent / name).read_bytes() for name in os.listdir(pair.parent)}
    assert not sidecar.repair(pair)
    assert before == {name: (pair.parent / name).read_bytes() for name in os.listdir(pair.parent)}
    with pytest.raises(MissingFileError):
        sidecar.repair(pair.parent / "absent")


def test_repair_takes_only_the_right_data(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    toc.save(toc.CheckpointState(trainable={"w": torch.ones(9)}), path, external_data=True)
    identity = path.read_bytes()[-64:].strip(b"\0").decode().removeprefix("TOCPAIR1")
    waiting = Path(f"{path}.data.{identity}")
    os.rename(f"{path}.data", waiting)
    good = waiting.read_bytes()
    waiting.write_bytes(good[:-1])
    assert not sidecar.repair(path)
    refused(path, "belongs to another save|missing")
    waiting.write_bytes(good)
    with pytest.warns(toc.CheckpointWarning, match="interrupted"):
        assert toc.load(path).trainable["w"].sum() == 9
    assert sidecar.repair(path)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "checkpoint.data"]
    assert toc.load(path).trainable["w"].sum() == 9


def outside(name: str, offset: int) -> Fields:
    return tensor(name.encode(), (2,), None, 1, Field(6, "int64", offset))


def write(folder: Path, tensors: list[Fields], data: bytes, *more: Field, has_external: bool = True) -> Path:
    path = folder / "checkpoint"
    flag = [Field(3, "bool", True)] if has_external else []
    path.write_bytes(official(checkpoint(module(tensors, None, *flag), *more)))
    Path(f"{path}.data").write_bytes(data)
    return path


def test_a_refused_save_leaves_the_data_of_an_interrupted_one(tmp_path: Path) -> None:
    """The same content again, when its data still waits for its final name and the checkpoint itself can't be replaced."""
    path = tmp_path / "checkpoint"
    state = toc.CheckpointState(trainable={"w": torch.ones(9)})
    toc.save(state, path, external_data=True)
    identity = path.read_bytes()[-64:].strip(b"\0").decode().removeprefix("TOCPAIR1")
    os.rename(f"{path}.data", f"{path}.data.{identity}")
    os.rename(path, tmp_path / "kept")
    path.mkdir()
    with pytest.raises(toc.CheckpointError, match="Is a directory"):
        toc.save(state, path, external_data=True)
    path.rmdir()
    os.rename(tmp_path / "kept", path)
    assert sidecar.repair(path)
    assert toc.load(path) == state
