"""ONNX Runtime reads what we write and continues training bit for bit; and how it treats files that it would not write itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt.checkpoint.state import OptimizerGroup
from torch_ort_ckpt.storage.system import is_windows

from ..truth import Truth, fixtures

pytestmark = pytest.mark.ort

ADAMW, SGD = "fbv2_ort1_19_2_adamw_full", "fbv2_ort1_19_2_sgd_full"
TRAINED = pytest.mark.parametrize("name", [ADAMW, SGD, "fbv2_ort1_19_2_external_adamw_full", "fbv2_ort1_18_0_adamw_full"])


def train(truth: Truth, checkpoint: Path, resaved: Path, *, steps: int = 2, optimizer: bool = True) -> list[float]:
    """Load the checkpoint in ORT, train on the recorded batches, let ORT save; the losses."""
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    state = CheckpointState.load_checkpoint(checkpoint)
    model = Module(truth.folder / "training_model.onnx", state, truth.folder / "eval_model.onnx")
    stepper = Optimizer(truth.folder / "optimizer_model.onnx", model)
    stepper.set_learning_rate(truth.json["resume"]["learning_rate"])
    losses = []
    for index in range(steps):
        loss: Any = model(truth.arrays[f"x_resume_in{index}"], truth.arrays[f"x_resume_target{index}"])
        losses.append(float(np.reshape(loss, -1)[0]))
        stepper.step()
        model.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, resaved, include_optimizer_state=optimizer)
    return losses


@TRAINED
@pytest.mark.parametrize("external", [False, True], ids=["inline", "external"])
def test_training_goes_on_to_the_same_bits(name: str, external: bool, tmp_path: Path) -> None:
    truth = Truth(name)
    toc.save(toc.load(truth.checkpoint), tmp_path / "ours", external_data=external)
    expected = train(truth, truth.checkpoint, tmp_path / "from theirs")
    assert train(truth, tmp_path / "ours", tmp_path / "from ours") == expected == truth.json["resume"]["losses"]
    after = toc.load(tmp_path / "from ours")
    assert after == toc.load(tmp_path / "from theirs")
    assert after.step == toc.load(truth.checkpoint).step + 2
    for param, key in truth.json["resume"]["final_params"].items():
        assert np.array_equal(after.trainable[param].numpy(), truth.arrays[key])


def loads_in_ort(name: str) -> bool:
    return "ort_load_checkpoint_error" not in Truth(name).json and "nominal" not in name


@pytest.mark.parametrize("external", [False, True], ids=["inline", "external"])
@pytest.mark.parametrize("name", [name for name in fixtures("fbv") if loads_in_ort(name)])
def test_ort_reads_every_state_we_write(name: str, external: bool, tmp_path: Path) -> None:
    from onnxruntime.training.api import CheckpointState

    state = toc.load(Truth(name).checkpoint)
    toc.save(state, tmp_path / "ours", external_data=external)
    theirs = CheckpointState.load_checkpoint(tmp_path / "ours")
    CheckpointState.save_checkpoint(theirs, tmp_path / "theirs", include_optimizer_state=True)
    assert toc.load(tmp_path / "theirs") == state


@pytest.mark.parametrize("external", [False, True], ids=["inline", "external"])
def test_tensor_data_starts_at_cache_lines(external: bool, tmp_path: Path) -> None:
    toc.save(toc.load(Truth(ADAMW).checkpoint), tmp_path / "ours", external_data=external)
    again = toc.load(tmp_path / "ours")
    found = {value.data_ptr() % 64 for _, value in again.tensors()}
    assert len(found) == 1 if is_windows() else found == {0}  # where it is read, memory starts anywhere


def test_a_step_per_weight_is_no_obstacle_to_ort_and_dropped_once_it_trained_on(tmp_path: Path) -> None:
    truth = Truth(ADAMW)
    state = toc.load(truth.checkpoint)
    for moments in state.optimizer["group0"].states.values():
        moments["step"] = torch.tensor(3)
    toc.save(state, tmp_path / "ours")
    assert train(truth, tmp_path / "ours", tmp_path / "after") == truth.json["resume"]["losses"]
    after = toc.load(tmp_path / "after").optimizer["group0"]
    assert after.step == 7
    assert not any("step" in moments for moments in after.states.values())


def test_moments_that_pytorch_had_not_yet_made_are_no_obstacle_to_ort(tmp_path: Path) -> None:
    """`torch.optim` has no state for a parameter that never had a gradient; ORT refuses to train without."""
    truth = Truth(ADAMW)
    state = toc.load(truth.checkpoint)
    state.optimizer["decay"] = group = state.optimizer.pop("group0")  # ORT ignores a group of another name
    for moments in group.states.values():
        for value in moments.values():
            value.zero_()
    toc.save(state, tmp_path / "zeros")
    group.states.pop("fc1.bias")
    group.states["fc2.bias"] = {}
    toc.save(state, tmp_path / "ours")
    assert toc.load(tmp_path / "ours") == state
    assert train(truth, tmp_path / "ours", tmp_path / "after") == train(truth, tmp_path / "zeros", tmp_path / "after zeros")
    after = toc.load(tmp_path / "after")
    assert after == toc.load(tmp_path / "after zeros")
    assert list(after.optimizer) == ["decay"]
    assert after.step == 7


def test_a_group_without_states_keeps_its_step_and_starts_with_zero_moments(tmp_path: Path) -> None:
    truth = Truth(ADAMW)
    state = toc.load(truth.checkpoint)
    group = state.optimizer["group0"]
    zeros = {name: {moment: torch.zeros_like(value) for moment, value in moments.items()} for name, moments in group.states.items()}
    for name, states in (("zeros", zeros), ("none", {})):
        group.states = states
        toc.save(state, tmp_path / name)
        train(truth, tmp_path / name, tmp_path / f"after {name}")
    assert toc.load(tmp_path / "after none") == toc.load(tmp_path / "after zeros")
    assert toc.load(tmp_path / "after none").step == 7


def test_another_complete_group_is_carried_along(tmp_path: Path) -> None:
    truth = Truth(ADAMW)
    state = toc.load(truth.checkpoint)
    other = OptimizerGroup(9, 0.5, None, {"w": {"momentum0": torch.ones(3)}})
    state.optimizer["other"] = other
    toc.save(state, tmp_path / "ours", groups="keep")
    assert train(truth, tmp_path / "ours", tmp_path / "after") == truth.json["resume"]["losses"]
    assert toc.load(tmp_path / "after").optimizer["other"] == other


def test_ort_wants_every_parameter_in_group0(tmp_path: Path) -> None:
    """Why several groups are refused unless they are merged."""
    truth = Truth(ADAMW)
    state = toc.load(truth.checkpoint)
    group = state.optimizer["group0"]
    moved = next(iter(group.states))
    state.optimizer["group1"] = OptimizerGroup(group.step, group.initial_lr, states={moved: group.states.pop(moved)})
    toc.save(state, tmp_path / "ours", groups="keep")
    with pytest.raises(RuntimeError, match="not found in the source optimizer checkpoint states"):
        train(truth, tmp_path / "ours", tmp_path / "after")
    toc.save(state, tmp_path / "merged", groups="merge")
    assert train(truth, tmp_path / "merged", tmp_path / "after") == truth.json["resume"]["losses"]


def test_our_properties_travel_through_ort_and_a_stale_rate_is_dropped(tmp_path: Path) -> None:
    truth = Truth(ADAMW)
    state = toc.load(truth.checkpoint)
    group = state.optimizer["group0"]
    group.lr, group.hyperparameters = 0.0375, {"betas": [0.9, 0.98]}
    state.properties["pi"] = 3.141592653589793
    toc.save(state, tmp_path / "ours")
    train(truth, tmp_path / "ours", tmp_path / "untrained", steps=0)
    assert toc.load(tmp_path / "untrained") == state
    train(truth, tmp_path / "ours", tmp_path / "trained")
    trained = toc.load(tmp_path / "trained")
    assert trained.optimizer["group0"].lr is None
    assert trained.optimizer["group0"].hyperparameters == {"betas": [0.9, 0.98]}
    assert trained.properties == state.properties
    train(truth, tmp_path / "ours", tmp_path / "weights", optimizer=False)
    assert toc.load(tmp_path / "weights").optimizer == {}
