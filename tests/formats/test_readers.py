"""What `inspect` says about who reads a file is what ORT itself does with it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt import formats
from torch_ort_ckpt.catalog import FORMATS, WRITABLE
from torch_ort_ckpt.cli import main
from torch_ort_ckpt.dtypes import TORCH_FROM_ONNX
from torch_ort_ckpt.formats import read_by
from torch_ort_ckpt.operations.summarize import summarize
from torch_ort_ckpt.report.inspection import inspection

from ..models import exported
from ..truth import Truth, fixtures

ADAMW = Truth("fbv2_ort1_19_2_adamw_full")
NOMINAL = Truth("fbv2_ort1_19_2_nominal")
DTYPES = [dtype for dtype in TORCH_FROM_ONNX.values() if not dtype.is_complex]


def weights(**frozen: Any) -> toc.CheckpointState:
    return toc.CheckpointState(trainable={"w": torch.ones(4, 3)}, frozen=frozen)


def with_states(change: Callable[[dict[str, Any]], Any]) -> toc.CheckpointState:
    """The trained fixture with other optimizer groups."""
    state = toc.load(ADAMW.checkpoint).clone()
    states = state.optimizer["group0"].states
    state.optimizer["group0"] = dataclasses.replace(state.optimizer["group0"], states={name: dict(each) for name, each in states.items()})
    change(state.optimizer)
    return state


def split(groups: dict[str, Any]) -> None:
    groups["group1"] = toc.OptimizerGroup(5, states={"fc1.bias": groups["group0"].states.pop("fc1.bias")})


LOADING = {
    "plain": weights(),
    "nothing": toc.CheckpointState(),
    "alias": dataclasses.replace(weights(), mixed_precision={"w": torch.ones(4, 3).half()}),
    "bfloat16 alias": dataclasses.replace(weights(), mixed_precision={"w": torch.ones(4, 3).bfloat16()}),
    "string": weights(text=np.array(["a"], dtype=object)),
    "no strings": weights(text=np.array([], dtype=object)),
    "no elements": weights(none=torch.zeros(0, 3)),
    "no name": weights(**{"": torch.ones(2)}),
    "half moment": dataclasses.replace(
        weights(), optimizer={"group0": toc.OptimizerGroup(1, states={"w": {"momentum0": torch.ones(4, 3).half()}})}
    ),
    "no property name": dataclasses.replace(weights(), properties={"": 1}),
    "nominal": toc.load(NOMINAL.checkpoint),
    "nominal half": toc.CheckpointState({"w": torch.empty((), dtype=torch.float16, device="meta")}, nominal=True),
    "nominal string": toc.CheckpointState(frozen={"s": np.array("", dtype=object)}, nominal=True),
    **{str(dtype).removeprefix("torch."): weights(other=torch.zeros(3).to(dtype)) for dtype in DTYPES},
}
TRAINING: dict[str, Callable[[dict[str, Any]], Any]] = {
    "as it was": lambda groups: None,
    "one parameter without a state": lambda groups: groups["group0"].states.pop("fc1.bias"),
    "one without a moment": lambda groups: groups["group0"].states["fc1.bias"].pop("momentum1"),
    "an empty state": lambda groups: groups["group0"].states["fc1.bias"].clear(),
    "all empty": lambda groups: [each.clear() for each in groups["group0"].states.values()],
    "no states": lambda groups: groups["group0"].states.clear(),
    "split in two": split,
    "another name": lambda groups: groups.update(mine=groups.pop("group0")),
    "a second group": lambda groups: groups.update(second=toc.OptimizerGroup(1)),
    "other moments": lambda groups: [each.update(zeta=each.pop("momentum0")) for each in groups["group0"].states.values()],
    "more moments": lambda groups: [each.update(zeta=torch.ones(3)) for each in groups["group0"].states.values()],
    "a stranger": lambda groups: groups["group0"].states.update(stranger={"momentum0": torch.ones(2), "momentum1": torch.ones(2)}),
    "double moments": lambda groups: groups["group0"].states["fc1.bias"].update(momentum0=torch.zeros(16, dtype=torch.float64)),
    "moments of another shape": lambda groups: groups["group0"].states["fc1.bias"].update(momentum0=torch.zeros(3)),
}  # fmt: skip


def official_loader_takes(path: Path) -> bool:
    from onnxruntime.training.api import CheckpointState

    try:
        CheckpointState.load_checkpoint(path)
    except RuntimeError:
        return False
    return True


def official_optimizer_takes(path: Path) -> tuple[bool, list[float]]:
    """Whether ORT trains two steps from the file, and the losses."""
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    state = CheckpointState.load_checkpoint(path)
    model = Module(ADAMW.folder / "training_model.onnx", state, ADAMW.folder / "eval_model.onnx")
    losses = []
    try:
        optimizer = Optimizer(ADAMW.folder / "optimizer_model.onnx", model)
        for index in range(2):
            loss: Any = model(ADAMW.arrays[f"x_resume_in{index}"], ADAMW.arrays[f"x_resume_target{index}"])
            losses.append(float(np.reshape(loss, -1)[0]))
            optimizer.step()
            model.lazy_reset_grad()
    except (RuntimeError, IndexError):
        return False, []
    return True, losses


@pytest.mark.ort
@pytest.mark.parametrize("external", [False, True], ids=["inline", "external"])
@pytest.mark.parametrize("name", LOADING)
def test_the_loader_takes_what_we_say_it_takes(name: str, external: bool, tmp_path: Path) -> None:
    state = LOADING[name]
    if external and state.nominal:
        pytest.skip("nothing to put elsewhere")
    toc.save(state, tmp_path / "ours", format="ort", include_mixed_precision=True, external_data=external)
    said = read_by("ort", tmp_path / "ours")
    assert official_loader_takes(tmp_path / "ours") == said.startswith("ORT 1.18 and later")
    if not said.startswith("ORT"):
        assert said.startswith("no release of ORT: ")
    toc.save(LOADING["plain"] if state.nominal else state, tmp_path / "old", format="ort", include_mixed_precision=True, version=1)
    assert not official_loader_takes(tmp_path / "old")
    assert read_by("ort", tmp_path / "old").startswith(("ORT 1.16 and 1.17", "no release of ORT: "))


@pytest.mark.ort
@pytest.mark.parametrize("name", TRAINING)
def test_its_optimizer_takes_what_we_say_it_takes(name: str, tmp_path: Path) -> None:
    toc.save(toc.load(ADAMW.checkpoint), tmp_path / "whole", format="ort")
    toc.save(with_states(TRAINING[name]), tmp_path / "ours", format="ort", groups="keep")
    said = read_by("ort", tmp_path / "ours")
    assert said.startswith("ORT 1.18 and later")
    trains, losses = official_optimizer_takes(tmp_path / "ours")
    assert trains == ("not to train from" not in said), said
    if trains and name != "no states":
        assert (losses == official_optimizer_takes(tmp_path / "whole")[1]) == ("moments ignored" not in said), said


@pytest.mark.ort
@pytest.mark.parametrize("name", [name for name in TRAINING if name not in ("split in two", "other moments", "double moments")])
def test_what_is_written_without_keep_ort_trains_from(name: str, tmp_path: Path) -> None:
    state = with_states(TRAINING[name])
    state.optimizer.pop("second", None)
    if "shape" in name:
        return
    toc.save(state, tmp_path / "ours", format="ort")
    assert read_by("ort", tmp_path / "ours") == "ORT 1.18 and later"
    assert official_optimizer_takes(tmp_path / "ours")[0]


@pytest.mark.ort
@pytest.mark.parametrize("name", [name for name in fixtures("fbv2") if "external" not in name])
def test_the_fixtures_are_read_by_whom_we_say(name: str) -> None:
    path = Truth(name).checkpoint
    assert official_loader_takes(path) == read_by("ort", path).startswith("ORT 1.18 and later")


@pytest.mark.ort
def test_ort_completes_a_nominal_checkpoint_of_ours() -> None:
    """The one that the export writes, with the buffer that a server would send."""
    from onnxruntime.training.api import CheckpointState, Module

    folder = Path(exported("mlp", nominal=True).folder)
    complete, nominal = (
        Module(folder / "training_model.onnx", CheckpointState.load_checkpoint(folder / name), folder / "eval_model.onnx")
        for name in ("checkpoint", "nominal_checkpoint")
    )
    nominal.copy_buffer_to_parameters(complete.get_contiguous_parameters(trainable_only=False), trainable_only=False)
    wanted, found = (each.get_contiguous_parameters(trainable_only=False).numpy() for each in (complete, nominal))
    assert np.any(wanted)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("frozen", "said"),
    [
        ({"w_fp16": torch.ones(4, 3).half()}, "no release of ORT: 'w_fp16' is float16, a half-precision alias"),
        ({"h": torch.ones(4).half()}, "no release of ORT: 'h' is float16"),
        ({"s": np.array(["a"], dtype=object)}, "no release of ORT: 's' is a string tensor"),
        ({"\x1b[2J": torch.ones(4).half()}, "no release of ORT: '\\x1b[2J' is float16"),
    ],
)
def test_inspect_and_its_page_say_why(frozen: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toc.save(weights(**frozen), tmp_path / "ours", format="ort")
    assert summarize(tmp_path / "ours").read_by == said
    assert ("Read by", said) in inspection(tmp_path / "ours")["facts"]
    assert main(["inspect", str(tmp_path / "ours")]) == 0
    assert f"readable as it is by {said}\n" in capsys.readouterr().out


def test_a_rank_and_a_set_of_ranks(tmp_path: Path) -> None:
    ranks = toc.split(toc.load(ADAMW.checkpoint), {"data_parallel_size": 2})
    for number, rank in enumerate(ranks):
        toc.save(rank, tmp_path / f"rank{number}", format="ort")
    assert "one rank of a set" in read_by("ort", tmp_path / "rank0")
    assert summarize(tmp_path).read_by == read_by("ort", tmp_path / "rank0")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (LOADING["plain"], "ORT 1.13 to 1.15"),
        (LOADING["alias"], "ORT 1.13 to 1.15"),
        (LOADING["string"], "no release of ORT: 'text' is a string tensor"),
        (LOADING["float8_e5m2"], "no release of ORT: 'other' is float8_e5m2"),
        (LOADING["no name"], "no release of ORT: a parameter has no name"),
        (with_states(split), "but not to train from: group0 has no state for 'fc1.bias'"),
    ],
)
def test_pbseq_folders(state: toc.CheckpointState, said: str, tmp_path: Path) -> None:
    """What ORT 1.15.1 did with such folders; a string tensor ended its process."""
    toc.save(state, tmp_path / "ours", format="pbseq", include_mixed_precision=True, groups="keep")
    assert said in read_by("pbseq", tmp_path / "ours")


def test_upgrade_gives_a_file_that_ort_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toc.save(LOADING["alias"], tmp_path / "old", format="ort", version=1, include_mixed_precision=True)
    assert main(["upgrade", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert "1 half-precision aliases are left out" in " ".join(capsys.readouterr().err.split())
    assert read_by("ort", tmp_path / "new") == "ORT 1.18 and later"
    toc.save(LOADING["string"], tmp_path / "text", format="ort", version=1)
    assert main(["upgrade", str(tmp_path / "text"), "--overwrite"]) == 0
    assert "readable by no release of ORT: 'text' is a string tensor" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", FORMATS)
def test_called_directly_a_format_has_the_defaults_of_load_and_save(name: str) -> None:
    format = formats.module(name)
    assert inspect.signature(format.read).parameters["mmap"].default is True
    if name in WRITABLE:
        assert inspect.signature(format.write).parameters["durable"].default is True
        assert inspect.signature(format.write).parameters["progress"].default is None
