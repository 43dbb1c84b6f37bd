"""`ortcp`: ORTTrainer's HDF5 files load bit for bit, and what we write has the tree that ORT's `_checkpoint_storage` gave it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_ort_ckpt as toc
from tests.refusals import why_refused
from tests.traps import Trap
from torch_ort_ckpt.errors import UnsupportedError

from ..strategies import states
from ..truth import Truth, assert_tensor, fixtures, raw

WHOLE = [name for name in fixtures("ortcp") if isinstance(Truth(name).json["checkpoint"], str)]
RANKS = [place for name in fixtures("ortcp") for place in sorted(Truth(name).folder.glob("*.ortcp"))]
OPTIONS = {"optimizer_name": str, "mixed_precision": bool}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", WHOLE)
def test_every_fixture_equals_its_truth(name: str, mmap: bool) -> None:
    truth = Truth(name)
    assert toc.detect(truth.checkpoint) == "ortcp"
    state = toc.load(truth.checkpoint, mmap=mmap)
    told = truth.json["orttrainer"]
    assert state.parameters.keys() == truth.json["parameters"].keys()
    for weight, entry in truth.json["parameters"].items():
        assert_tensor(state.parameters[weight], entry, truth.arrays)
    if told["optimizer"]:
        assert sorted(state.frozen) == told["frozen_weights"]
    assert bool(state.optimizer) == ("noopt" not in name)
    for weight, values in (told["optimizer"] or {}).items():
        ours = state.optimizer["group0"].states[weight]
        assert ours.keys() == {"momentum0", "momentum1"}
        assert raw(ours["momentum0"]) == truth.arrays[values["Moment_1"]["array"]].tobytes()
        assert raw(ours["momentum1"]) == truth.arrays[values["Moment_2"]["array"]].tobytes()
        assert truth.arrays[values["Update_Count"]["array"]].tolist() == [state.optimizer["group0"].step + 1]
    assert state.step == (0 if "noopt" in name else told["train_step_info"]["optimization_step"])
    assert {key: value for key, value in state.properties.items() if key != "user_dict"} == {
        "step": told["train_step_info"]["step"],
        "weight_update_step": told["train_step_info"]["optimization_step"],
        "optimizer_name": told["trainer_options"]["optimizer_name"],
        "mixed_precision": int(told["trainer_options"]["mixed_precision"]),
    }


@pytest.mark.parametrize("place", RANKS, ids=lambda place: f"{place.parent.name}-{place.stem}")
def test_what_we_write_has_the_tree_that_ort_wrote(place: Path, tmp_path: Path) -> None:
    state = toc.load(place)
    toc.save(state, tmp_path / "again.ortcp", format="ortcp")
    assert toc.load(tmp_path / "again.ortcp") == state
    with h5py.File(place) as theirs, h5py.File(tmp_path / "again.ortcp") as ours:
        _assert_same_tree(ours, theirs)


@given(state=states(), mmap=st.booleans())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_state_that_hdf5_can_hold_survives(state: toc.CheckpointState, mmap: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.ortcp"
        refusal = why_refused(state, path, format="ortcp")
        if refusal is None:
            assert toc.load(path, mmap=mmap) == state
        else:
            assert any(reason in refusal for reason in ("files have no", "HDF5 can't keep", "clashes"))
            assert not os.listdir(folder)


def test_slashes_in_names_nest_groups(tmp_path: Path) -> None:
    weights = {"encoder/layer.0/weight": torch.ones(2), "encoder/bias": torch.zeros(1)}
    moments = {name: {"momentum0": value, "momentum1": value} for name, value in weights.items()}
    group = toc.OptimizerGroup(4, states=moments)
    state = toc.CheckpointState(weights, optimizer={"group0": group}, properties={"optimizer_name": "AdamOptimizer"})
    toc.save(state, tmp_path / "c.ortcp", format="ortcp")
    with h5py.File(tmp_path / "c.ortcp") as file:
        assert file["model/full_precision/encoder/layer.0/weight"].shape == (2,)
        assert file["optimizer/encoder/bias/Update_Count"][()].tolist() == [5]
    again = toc.load(tmp_path / "c.ortcp")
    assert again.parameters.keys() == weights.keys()
    assert again.optimizer == state.optimizer


def test_names_that_would_be_both_a_dataset_and_a_group_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="clashes"):
        toc.save(toc.CheckpointState({"a": torch.ones(1), "a/b": torch.ones(1)}), tmp_path / "c.ortcp", format="ortcp")


def test_half_precision_moments_and_aliases_survive(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    group = toc.OptimizerGroup(2, states={"w": {"momentum0": torch.ones(3, 2).half(), "momentum1": torch.ones(3, 2).half()}})
    state = toc.CheckpointState(
        {"w": weight},
        optimizer={"group0": group},
        mixed_precision={"w": weight.half()},
        properties={"mixed_precision": 1, "optimizer_name": "LambOptimizer"},
    )
    for name in ("ortcp", "runner", "pbseq", "ort"):
        toc.save(state, tmp_path / name, format=name, include_mixed_precision=True)
        assert toc.load(tmp_path / name) == state
    with h5py.File(tmp_path / "ortcp") as file:
        assert file["model/mixed_precision/w"].dtype == np.float16
        assert file["optimizer/shared_optimizer_state/Step"][()].tolist() == [3]


def test_the_user_dict_is_never_unpickled_unless_asked_for(tmp_path: Path) -> None:
    mine = tmp_path / "sprung"
    text = pickle.dumps({"trap": Trap(mine)}).hex()
    state = toc.CheckpointState({"w": torch.ones(1)}, properties={"user_dict": text})
    toc.save(state, tmp_path / "c.ortcp", format="ortcp")
    again = toc.load(tmp_path / "c.ortcp")
    assert again.properties["user_dict"] == text
    toc.save(again, tmp_path / "c", format="ort")
    assert toc.load(tmp_path / "c").properties["user_dict"] == text
    assert not mine.exists()
    toc.load(tmp_path / "c.ortcp", unsafe_user_dict=True)
    assert mine.exists()


@pytest.mark.parametrize("name", ["ortcp_ort1_12_0_adam", "ortcp_ort1_14_1_sgd"])
def test_a_trusted_user_dict_can_be_had(name: str, tmp_path: Path) -> None:
    truth = Truth(name)
    state = toc.load(truth.checkpoint, unsafe_user_dict=True)
    assert state.properties["user_dict"] == truth.json["orttrainer"]["user_dict"]
    toc.save(state, tmp_path / "again.ortcp", format="ortcp")
    assert toc.load(tmp_path / "again.ortcp", unsafe_user_dict=True).properties == state.properties
    with pytest.raises(UnsupportedError, match="int, float or str"):
        toc.save(state, tmp_path / "c", format="ort")


def test_a_damaged_user_dict_is_an_error_only_when_asked_for(tmp_path: Path) -> None:
    toc.save(toc.CheckpointState({"w": torch.ones(1)}, properties={"user_dict": "80zz"}), tmp_path / "c.ortcp", format="ortcp")
    assert toc.load(tmp_path / "c.ortcp").properties["user_dict"] == "80zz"
    with pytest.raises(toc.CheckpointError, match="unpickled"):
        toc.load(tmp_path / "c.ortcp", unsafe_user_dict=True)


def test_another_hdf5_file_is_told_apart(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "keras.h5", "w") as file:
        file["layer/kernel"] = np.ones(3)
    with pytest.raises(toc.CheckpointError, match="no checkpoint of ORTTrainer"):
        toc.load(tmp_path / "keras.h5")


def test_reading_needs_no_h5py_and_writing_names_the_extra(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['h5py'] = None\n"
        "import torch_ort_ckpt as toc\n"
        f"state = toc.load({str(Truth('ortcp_ort1_12_0_adam').checkpoint)!r})\n"
        f"try: toc.save(state, {str(tmp_path / 'c.ortcp')!r}, format='ortcp')\n"
        "except toc.CheckpointError as error: print(isinstance(error, ImportError), error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("True")
    assert "torch-ort-ckpt[legacy]" in done.stdout
    assert not list(tmp_path.iterdir())


def _assert_same_tree(ours: Any, theirs: Any) -> None:
    """As `_checkpoint_storage.load` would see it: names, kinds, shapes, types and values."""
    assert sorted(ours) == sorted(theirs)
    for name in theirs:
        a, b = ours[name], theirs[name]
        assert type(a) is type(b)
        if isinstance(b, h5py.Group):
            _assert_same_tree(a, b)
        else:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert np.array_equal(a[()], b[()])
