"""States that earlier versions changed silently: now equal, refused, or named in a warning. `tests/fuzz` looks for more."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_ort_ckpt as toc

from ..fuzz.test_round_trips import EQUAL, REFUSED, VARIANTS, WARNED, outcome

FORMATS = {name: variant for name, variant in VARIANTS.items() if not name.startswith(("torch bare", "onnx"))}


def text(*values: Any) -> Any:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def group(**more: Any) -> toc.OptimizerGroup:
    return toc.OptimizerGroup(3, states={"w": {"momentum0": torch.ones(2), "momentum1": torch.ones(2)}}, **more)


def state(**more: Any) -> toc.CheckpointState:
    return toc.CheckpointState(**{"trainable": {"w": torch.ones(2)}, **more})


def moments(states: Any) -> toc.OptimizerGroup:
    return toc.OptimizerGroup(9, states={"w": states})


QUANTIZED = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
KEPT = {
    "only a step of its own": state(optimizer={"group0": moments({"step": torch.tensor(3)})}),
    "a step as PyTorch has it": state(optimizer={"group0": moments({"step": torch.tensor(3.0)})}),
    "a step beyond 2^53": state(optimizer={"group0": toc.OptimizerGroup((1 << 53) + 1)}),
    "tuples": state(optimizer={"group0": group(hyperparameters={"betas": (0.9, 0.95), "deep": [((),)]})}),
    "a name that our notes use": state(optimizer={"group0": group(hyperparameters={"a": {"__tuple__": [1]}})}),
    "not a number": state(optimizer={"group0": group(hyperparameters={"a": math.nan}, lr=math.nan)}, properties={"p": math.nan, "q": -0.0}),
    "a weight that looks like an alias": toc.CheckpointState({"w": torch.ones(2), "w_fp16": torch.ones(2).half()}),
    "numpy's numbers": state(properties={"p": np.float64(0.1)}, optimizer={"group0": group(hyperparameters={"eps": np.float64(0.1)})}),
}
NAMELESS = toc.CheckpointState({"": torch.ones(2)}, mixed_precision={"": torch.ones(2).half()})
LONELY = state(mixed_precision={"elsewhere": torch.ones(2).half()})
NOWHERE: dict[str, tuple[toc.CheckpointState, str]] = {
    "both": (toc.CheckpointState({"w": torch.ones(2)}, {"w": torch.zeros(2)}), "both trainable and frozen"),
    "numbers among strings": (state(frozen={"s": text("a", 1)}), "a int among the strings"),
    "bytes among strings": (state(frozen={"s": text(b"a")}), "a bytes among the strings"),
    "an array of numbers": (state(frozen={"s": np.ones(2)}), "numpy array of float64"),
    "a list": (state(frozen={"s": [1.0]}), "a list"),
    "a lone surrogate in a string": (state(frozen={"s": text("\ud800")}), "surrogate"),
    "a lone surrogate in a property": (state(properties={"p": "\ud800"}), "surrogate"),
    "a lone surrogate in a name": (toc.CheckpointState({"\ud800": torch.ones(2)}), "not Unicode"),
    "a number for a name": (toc.CheckpointState({1: torch.ones(2)}), "a name that is not text"),  # type: ignore[dict-item]
    "a number for a moment's name": (state(optimizer={"group0": moments({0: torch.ones(2)})}), "a name that is not text"),
    "a sparse tensor": (toc.CheckpointState({"w": torch.eye(2).to_sparse()}), "a sparse_coo tensor"),
    "a quantized tensor": (toc.CheckpointState({"w": QUANTIZED}), "a quantized tensor"),
    "a nested tensor": (toc.CheckpointState({"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}), "a nested tensor"),
    "a tensor for a rate": (state(optimizer={"group0": group(lr=torch.tensor(0.1))}), "lr is a Tensor"),
    "a tensor for a hyper-parameter": (state(optimizer={"group0": group(hyperparameters={"lr": torch.ones(1)})}), "a Tensor, which is not"),
    "numbers for names": (state(optimizer={"group0": group(hyperparameters={"a": {1: 2}})}), "names that are not text"),
    "a step that is no integer": (state(optimizer={"group0": toc.OptimizerGroup(1.5)}), "step is a float"),  # type: ignore[arg-type]
    "an alias of strings": (state(frozen={"s": text("a")}, mixed_precision={"s": torch.ones(1).half()}), "alias of a string tensor"),
    "half a step": (state(optimizer={"group0": moments({"step": torch.tensor(2.5)})}), "not one whole number"),
    "a shape beyond 64 bits": (state(partitions={"w": toc.PartitionInfo((1 << 70,))}), "not a partition"),
    "an alias of another type": (state(mixed_precision={"w": torch.ones(2)}), "must be float16 or bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("variant", FORMATS)
@pytest.mark.parametrize("name", KEPT)
def test_comes_back_as_it_was(name: str, variant: str, tmp_path: Path) -> None:
    assert outcome(KEPT[name], FORMATS[variant], tmp_path / "case") == EQUAL


@pytest.mark.parametrize("variant", FORMATS)
@pytest.mark.parametrize("odd", [NAMELESS, LONELY], ids=["the alias of a weight without a name", "an alias without a weight"])
def test_aliases_stay_where_they_are(odd: toc.CheckpointState, variant: str, tmp_path: Path) -> None:
    expected = {EQUAL, REFUSED} if variant in ("ortcp", "runner") else {EQUAL}
    assert outcome(odd, FORMATS[variant], tmp_path / "case") in expected


@pytest.mark.parametrize("variant", ["ort", "safetensors folder", "torch", "pbseq", "runner", "ortcp", "dcp"])
@pytest.mark.parametrize("name", NOWHERE)
def test_is_refused_by_name_everywhere(name: str, variant: str, tmp_path: Path) -> None:
    odd, message = NOWHERE[name]
    with pytest.raises(toc.CheckpointError, match=message) as caught:
        toc.save(odd, tmp_path / FORMATS[variant].name, format=FORMATS[variant].format, include_mixed_precision=True)
    assert caught.value.field
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["Moment_1", "Update_Count", "a/b"])
@pytest.mark.parametrize("format", ["ortcp", "runner"])
def test_moments_that_orttrainer_would_read_otherwise_are_refused(moment: str, format: str, tmp_path: Path) -> None:
    odd = state(optimizer={"group0": moments({moment: torch.ones(2)})})
    assert outcome(odd, VARIANTS[format], tmp_path / "case") == REFUSED


@pytest.mark.parametrize("variant", ["torch bare", "onnx"])
@pytest.mark.parametrize(
    ("odd", "what"),
    [
        (toc.CheckpointState(frozen={"w": torch.ones(2)}), "which weights are trained"),
        (toc.CheckpointState({"w": torch.tensor([1])}), "which weights are trained"),
        (state(partitions={"w": toc.PartitionInfo((2,))}), "partitions"),
        (state(properties={"p": 1}), "properties"),
        (LONELY, "which tensors are half-precision aliases"),
    ],
)
def test_files_of_weights_say_what_they_leave_out(odd: toc.CheckpointState, what: str, variant: str, tmp_path: Path) -> None:
    chosen = VARIANTS[variant]
    assert outcome(odd, chosen, tmp_path / "case") == WARNED
    with pytest.warns(toc.CheckpointWarning, match=f"left out: {what}"):
        toc.save(odd, tmp_path / "case" / chosen.name, format=chosen.format, include_mixed_precision=True, **chosen.options)


def test_a_nominal_checkpoint_says_that_values_are_left_out(tmp_path: Path) -> None:
    assert outcome(toc.CheckpointState({"w": torch.ones(2)}, nominal=True), VARIANTS["ort"], tmp_path / "case") == WARNED


def test_a_state_dict_with_and_without_a_prefix_keeps_both(tmp_path: Path) -> None:
    torch.save({"module.w": torch.ones(2), "w": torch.zeros(2)}, tmp_path / "x.pt")
    assert toc.load(tmp_path / "x.pt").trainable.keys() == {"module.w", "w"}


def test_notes_of_earlier_releases_still_read(tmp_path: Path) -> None:
    """Their hyper-parameters are plain JSON, and the aliases of a runner folder a list."""
    from torch_ort_ckpt.formats.legacy import moments

    found = toc.CheckpointState({"w": torch.ones(2), "": torch.ones(2), "_fp16": torch.ones(2).half()})
    note = (
        '{"aliases": [""], "optimizer": {"group0": {"step": 1, "initial_lr": 0.1, "lr": null, "hyperparameters": {"betas": [0.9, 0.95]}, '
    )
    note += '"members": ["w"], "own_steps": {"w": 4}}}}'
    moments.restore(found, note, tmp_path)
    assert found.mixed_precision.keys() == {""}
    assert found.optimizer["group0"].hyperparameters == {"betas": [0.9, 0.95]}
    assert found.optimizer["group0"].states["w"]["step"].dtype == torch.int64


@pytest.mark.parametrize("variant", ["safetensors", "torch", "dcp"])
def test_what_is_shared_in_memory_can_be_read_again(variant: str, tmp_path: Path) -> None:
    """Readers refuse files that ask for far more than they hold: one weight under many names, or one number expanded, must not make one."""
    chosen = VARIANTS[variant]
    value = torch.arange(300_000, dtype=torch.float32)
    tied = toc.CheckpointState({f"w{number}": value for number in range(70)})
    assert outcome(tied, chosen, tmp_path / "case") == EQUAL
    assert outcome(state(frozen={"ones": torch.ones(1).expand(20_000_000)}), chosen, tmp_path / "case") == EQUAL


@pytest.mark.parametrize("dims", [(-1,), (1 << 64,), (1,) * 65, (2.0,), [2]])
@pytest.mark.parametrize("variant", ["ort", "safetensors", "torch", "runner", "ortcp", "dcp"])
def test_partitions_that_could_not_be_read_again_are_refused(variant: str, dims: Any, tmp_path: Path) -> None:
    assert outcome(state(partitions={"w": toc.PartitionInfo(dims)}), VARIANTS[variant], tmp_path / "case") == REFUSED
