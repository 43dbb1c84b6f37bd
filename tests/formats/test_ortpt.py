"""`ortpt`: the files of `experimental_save_checkpoint`, whole and in ZeRO ranks; nothing in them is ever run."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.traps import Trap
from torch_ort_ckpt.errors import CorruptFileError, UnsupportedError

from ..truth import Truth, fixtures, raw

NAMES = {"momentum0": "Moment_1", "momentum1": "Moment_2"}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", fixtures("ortpt"))
def test_every_fixture_equals_its_truth(name: str, mmap: bool) -> None:
    truth = Truth(name)
    files = truth.json["checkpoint"]
    paths = [truth.folder / file for file in ([files] if isinstance(files, str) else random.sample(files, len(files)))]
    assert {toc.detect(path) for path in paths} == {"ortpt"}
    state = toc.load(paths if len(paths) > 1 else paths[0], mmap=mmap)
    assert state == toc.load(truth.folder)
    group = state.optimizer["group0"]
    flat = dict(state.parameters) | {f"{weight}_fp16": alias for weight, alias in state.mixed_precision.items()}
    for weight, values in group.states.items():
        flat |= {f"{NAMES[moment]}_{weight}": value for moment, value in values.items()}
        flat[f"Update_Count_{weight}"] = torch.tensor([group.step + 1])
    assert flat.keys() == truth.json["flat_state"].keys()
    for label, entry in truth.json["flat_state"].items():
        assert list(flat[label].shape) == entry["shape"]
        assert raw(flat[label]) == truth.arrays[entry["array"]].tobytes()
    for key, value in truth.json.get("user_keys", {}).items():
        assert state.properties[key] == value


def test_the_weights_that_no_optimizer_knows_are_frozen() -> None:
    assert sorted(toc.load(Truth("ortpt_ort1_12_0_experimental").checkpoint).frozen) == ["fc1.bias"]


def test_a_renamed_file_is_known_by_its_content(tmp_path: Path) -> None:
    place = Truth("ortpt_ort1_12_0_experimental").checkpoint
    os.symlink(place, tmp_path / "renamed.pt")
    assert toc.detect(tmp_path / "renamed.pt") == "ortpt"
    assert toc.load(tmp_path / "renamed.pt") == toc.load(place)


def test_a_rank_whose_name_does_not_say_which_is_refused(tmp_path: Path) -> None:
    os.symlink(Truth("ortpt_ort1_13_1_zero_fp32").folder / "ORT_checkpoint.ZeRO.0.1.ort.pt", tmp_path / "a.ort.pt")
    with pytest.raises(toc.CheckpointError, match="which"):
        toc.load(tmp_path / "a.ort.pt")


def test_it_cannot_be_written() -> None:
    with pytest.raises(UnsupportedError, match="not written"):
        toc.save(toc.CheckpointState(), "x.ort.pt", format="ortpt")


def test_code_in_the_file_is_not_run(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "x": Trap(tmp_path / "sprung")}, tmp_path / "a.ort.pt")
    with pytest.raises(UnsupportedError, match="could run code is never loaded"):
        toc.load(tmp_path / "a.ort.pt")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("content", [[1], {"model": 3}, {"model": {"w": 3}}, {"model": {3: torch.ones(1)}}, {}])
def test_what_is_no_checkpoint_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.ort.pt")
    with pytest.raises(CorruptFileError, match="model"):
        toc.load(tmp_path / "a.ort.pt")


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(1).expand(1 << 40)}}, tmp_path / "a.ort.pt")
    with pytest.raises(CorruptFileError, match="model"):
        toc.load(tmp_path / "a.ort.pt")


def test_a_user_s_own_data_becomes_properties(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "epoch": 3, "flag": True, "list": [1, {"a": None}], 5: "x"}, tmp_path / "a.ort.pt")
    assert toc.load(tmp_path / "a.ort.pt").properties == {"epoch": 3, "flag": 1, "list": '[1, {"a": null}]', "5": "x"}
    torch.save({"model": {"w": torch.ones(1)}, "shape": torch.Size([2, 3]), "scalar": torch.Size([])}, tmp_path / "c.ort.pt")
    assert toc.load(tmp_path / "c.ort.pt").properties == {"shape": "[2, 3]", "scalar": "[]"}
    torch.save({"model": {"w": torch.ones(1)}, "rng": torch.ones(2)}, tmp_path / "b.ort.pt")
    with pytest.warns(toc.CheckpointWarning, match="rng"):
        toc.load(tmp_path / "b.ort.pt")
