"""More malicious files: HDF5 of the newer layout, names of interrupted saves, metadata that is nested too deeply."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt import formats
from torch_ort_ckpt.errors import CorruptFileError, UnsupportedError
from torch_ort_ckpt.formats import plain
from torch_ort_ckpt.storage.system import is_windows

from ..fuzz.mutate import limited_memory

h5py = pytest.importorskip("h5py")


def hdf5(path: Path, name: str, **dataset: Any) -> Path:
    with h5py.File(path, "w", libver="latest") as file:
        file.create_group("model/full_precision")
        file.create_dataset("model/full_precision/w", data=np.ones(2, np.float32))
        file.create_dataset(name, **dataset)
    return path


def refused(path: Path) -> toc.CheckpointError:
    with limited_memory(), pytest.raises(toc.CheckpointError) as caught:
        toc.load(path)
    assert caught.value.path == str(path)
    return caught.value


def test_text_that_many_elements_share_is_no_bomb(tmp_path: Path) -> None:
    """Each of ten thousand strings is the same megabyte."""
    path = hdf5(tmp_path / "x.ortcp", "user_dict", data=["A" * (1 << 20), *["b"] * 9_999], dtype=h5py.string_dtype())
    with h5py.File(path) as file:
        start = file["user_dict"].id.get_offset()
    data = bytearray(path.read_bytes())
    data[start : start + 160_000] = bytes(data[start : start + 16]) * 10_000
    path.write_bytes(data)
    assert "more text than the file holds" in str(refused(path))


@pytest.mark.parametrize("where", ["user_dict", "model/full_precision/x"])
def test_text_of_a_fixed_length_that_was_never_written_is_no_bomb(where: str, tmp_path: Path) -> None:
    refused(hdf5(tmp_path / "x.ortcp", where, shape=(16,), dtype="S1000000000"))


def test_strings_in_the_newer_layout_are_read(tmp_path: Path) -> None:
    path = hdf5(tmp_path / "x.ortcp", "model/full_precision/s", data=[["a", "имя"], ["", "d" * 1000]], dtype=h5py.string_dtype())
    assert toc.load(path).parameters["s"].tolist() == [["a", "имя"], ["", "d" * 1000]]
    path = hdf5(tmp_path / "y.ortcp", "user_dict", data="80037d2e", dtype=h5py.string_dtype())
    assert toc.load(path).properties["user_dict"] == "80037d2e"
    path = hdf5(tmp_path / "z.ortcp", "model/full_precision/s", data=np.array([b"abc", b"de"], "S3"))
    assert toc.load(path).parameters["s"].tolist() == ["abc", "de"]


# The identity of a save is part of a file's name


@pytest.mark.parametrize("identity", ["/../../outside", "x/y", "..", "", "a\0b", "A" * 32, "a" * 5000, "\ud800", "-" * 32])
def test_an_identity_that_is_none_leads_nowhere(identity: str, tmp_path: Path) -> None:
    place = tmp_path / "inside" / "m"
    state = toc.CheckpointState({"a": torch.ones(100), "b": torch.ones(100)})
    toc.save(state, place, format="safetensors", max_shard_size=400)
    index = place / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["metadata"]["torch_ort_ckpt.set"] = identity
    index.write_text(json.dumps(content))
    for name in () if is_windows() else set(content["weight_map"].values()):  # Windows has no names with a dot at the end
        os.makedirs(place / f"{name}.", exist_ok=True)  # so that a path through it exists
    with pytest.raises(CorruptFileError):
        toc.load(place)
    before = sorted(str(item) for item in tmp_path.rglob("*"))
    assert not toc.verify(place, repair=True)
    assert sorted(str(item) for item in tmp_path.rglob("*")) == before


# Notes


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp", "runner", "ortcp"])
def test_deep_hyper_parameters_are_refused(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a parser accepts can be nested too deeply to compare."""
    deep: Any = []
    for _ in range(80):
        deep = [deep]
    state = toc.CheckpointState({"w": torch.ones(2)})
    state.optimizer["group0"] = toc.OptimizerGroup(1, states={"w": {"momentum0": torch.ones(2)}}, hyperparameters={"h": deep})
    with pytest.raises(UnsupportedError, match="nested too deeply"):
        toc.save(state, tmp_path / "x", format=format)
    monkeypatch.setattr(formats, "check_savable", lambda *_: None)
    monkeypatch.setattr(plain.encode, "__defaults__", (200,))
    toc.save(state, tmp_path / "x", format=format)
    with pytest.raises(CorruptFileError, match="nested too deeply"):
        toc.load(tmp_path / "x", format=format)


@pytest.mark.parametrize("axis", ["0", 1.5, None, [0], True])
def test_an_axis_that_is_no_number_is_refused(axis: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = toc.CheckpointState({"w": torch.ones(2)}, partitions={"w": toc.PartitionInfo((2,), axis)})
    with pytest.raises(UnsupportedError, match="not a partition"):
        toc.save(state, tmp_path / "x")
    monkeypatch.setattr(formats, "check_savable", lambda *_: None)
    toc.save(state, tmp_path / "x")
    with pytest.raises(CorruptFileError, match="partition"):
        toc.load(tmp_path / "x")
