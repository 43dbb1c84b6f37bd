"""The options of `convert` change what is written, and what is written is still compared with what was meant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt.storage import files


@pytest.fixture
def halves(tmp_path: Path) -> Path:
    """A weight that exists in half precision alone, and one with a master and its alias."""
    state = toc.CheckpointState(
        {"h_fp16": torch.tensor([1.5, 2.5]).half(), "w": torch.tensor([1.0, 3.0])}, mixed_precision={"w": torch.tensor([1.0, 3.0]).half()}
    )
    toc.save(state, tmp_path / "source", include_mixed_precision=True)
    return tmp_path / "source"


@pytest.mark.parametrize("aliases", [False, True])
def test_upcast_half(halves: Path, aliases: bool, tmp_path: Path) -> None:
    plain = toc.convert(halves, tmp_path / "plain", to_format="torch", include_mixed_precision=aliases)
    assert plain.trainable["h_fp16"].dtype == torch.float16
    toc.convert(halves, tmp_path / "up", to_format="torch", upcast_half=True, include_mixed_precision=aliases)
    written = toc.load(tmp_path / "up")
    assert {name: value.dtype for name, value in written.trainable.items()} == {"h": torch.float32, "w": torch.float32}
    assert written.trainable["h"].tolist() == [1.5, 2.5]
    assert sorted(written.mixed_precision) == (["h", "w"] if aliases else [])


def grouped(steps: tuple[int, int] = (5, 9)) -> toc.CheckpointState:
    weights = {"a": torch.arange(4.0), "b": torch.arange(6.0)}
    groups = {
        f"group{number}": toc.OptimizerGroup(
            step, 0.1, 0.1 * (number + 1), {name: {"momentum0": weights[name] + 1, "momentum1": weights[name] + 2}}, {"eps": 1e-6}
        )
        for number, (step, name) in enumerate(zip(steps, "ab", strict=True))
    }
    return toc.CheckpointState(weights, optimizer=groups)


def test_merged_groups_pass_their_verification(tmp_path: Path) -> None:
    toc.save(grouped(), tmp_path / "source", format="torch")
    with pytest.warns(toc.CheckpointWarning, match="merging 2 optimizer groups: lr differ; the rates of the first are kept"):
        toc.convert(tmp_path / "source", tmp_path / "merged", to_format="ort", groups="merge", verify=True)
    (group,) = toc.load(tmp_path / "merged").optimizer.values()
    assert (group.step, group.lr, group.hyperparameters) == (9, 0.1, {"eps": 1e-6})
    assert group.states["a"]["momentum1"].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert group.states["b"]["momentum0"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert int(group.states["a"]["step"]) == 5
    assert "step" not in group.states["b"]


def test_groups_are_refused_unless_asked_for(tmp_path: Path) -> None:
    toc.save(grouped(), tmp_path / "source", format="torch")
    with pytest.raises(toc.CheckpointError, match="trains with one optimizer group"):
        toc.convert(tmp_path / "source", tmp_path / "ort", to_format="ort")
    toc.convert(tmp_path / "source", tmp_path / "kept", to_format="ort", groups="keep")
    assert toc.load(tmp_path / "kept") == grouped()


@pytest.mark.parametrize("options", [{}, {"groups": "merge"}])
def test_a_damaged_copy_is_noticed(options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk gives back another byte than was written: an error, also where the groups are not compared one by one."""
    state = grouped((9, 9))
    state.optimizer["group1"].lr = state.optimizer["group0"].lr
    if not options:
        state.optimizer = {}
    toc.save(state, tmp_path / "source", format="torch")
    real = files.os.preadv if hasattr(os, "preadv") else pytest.skip("reads back where preadv exists")

    def flipped(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        found = real(descriptor, buffers, offset)
        buffers[0][found - 1] ^= 1
        return found

    toc.convert(tmp_path / "source", tmp_path / "fine", to_format="ort", **options)  # type: ignore[arg-type]
    monkeypatch.setattr(files.os, "preadv", flipped)
    with pytest.raises(toc.CheckpointError, match="what was read back is not what was written"):
        toc.convert(tmp_path / "source", tmp_path / "damaged", to_format="ort", **options)  # type: ignore[arg-type]
    toc.convert(tmp_path / "source", tmp_path / "unverified", to_format="ort", verify=False, **options)  # type: ignore[arg-type]


def test_transposed_names_turn_moments_too(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    moments = {"momentum0": weight + 1, "momentum1": weight + 2, "per_row": torch.arange(2.0)}
    toc.save(
        toc.CheckpointState({"x": weight}, optimizer={"group0": toc.OptimizerGroup(3, states={"x": moments})}),
        tmp_path / "a",
        format="torch",
    )
    names = toc.NameMap.from_dict({"x": {"name": "fc.weight", "transpose": True}})
    toc.convert(tmp_path / "a", tmp_path / "b", to_format="torch", names=names)
    found = toc.load(tmp_path / "b")
    assert torch.equal(found.trainable["fc.weight"], weight.T)
    states = found.optimizer["group0"].states["fc.weight"]
    assert torch.equal(states["momentum0"], weight.T + 1)
    assert torch.equal(states["momentum1"], weight.T + 2)
    assert torch.equal(states["per_row"], torch.arange(2.0))
