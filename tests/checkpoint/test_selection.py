"""`load(only=)` and `load(device=)`: parts of a checkpoint, and tensors on another device, whatever the format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt.checkpoint.selection import on_device, selected

from ..fuzz.test_round_trips import VARIANTS

WHOLE = [name for name in VARIANTS if not name.startswith(("onnx", "torch bare"))]


def state() -> toc.CheckpointState:
    names = ("fc1.weight", "fc1.bias", "fc2.weight")
    moments = {name: {"momentum0": torch.full((2,), 1.0), "momentum1": torch.full((2,), 2.0)} for name in names}
    return toc.CheckpointState(
        {name: torch.full((2,), float(n)) for n, name in enumerate(names)},
        {"scale": torch.tensor([3.0])},
        {"group0": toc.OptimizerGroup(step=5, states=moments)},
        {"epoch": 3},
        {"fc1.weight": torch.zeros(2).half()},
    )


@pytest.mark.parametrize("variant", WHOLE)
def test_only_keeps_moments_and_aliases_in_every_format(variant: str, tmp_path: Path) -> None:
    chosen = VARIANTS[variant]
    path = tmp_path / chosen.name
    toc.save(state(), path, format=chosen.format, include_mixed_precision=True, durable=False, **chosen.options)
    whole, part = toc.load(path), toc.load(path, only=["fc1.*", "scale"])
    assert list(part.keys()) == [name for name in whole.keys() if name != "fc2.weight"]  # noqa: SIM118
    assert part.optimizer["group0"].states.keys() == {"fc1.weight", "fc1.bias"}
    assert part.optimizer["group0"].states["fc1.bias"].keys() == {"momentum0", "momentum1"}
    assert part.mixed_precision.keys() == whole.mixed_precision.keys() == {"fc1.weight"}
    assert part.properties == whole.properties
    assert part.step == 5
    assert "fc2.weight" not in toc.load(path, only=["scale"]).optimizer["group0"].states
    assert toc.load(path, only=["scale"]).mixed_precision == {}


@pytest.mark.parametrize("variant", ["torch bare", "onnx"])
def test_only_of_files_of_weights(variant: str, tmp_path: Path) -> None:
    path = tmp_path / VARIANTS[variant].name
    if variant == "onnx":
        _model(path)
    else:
        toc.save(toc.CheckpointState({"a.w": torch.ones(2), "b.w": torch.ones(2)}), path, bare=True)
    assert list(toc.load(path, only=["a.*"]).keys()) == ["a.w"]


def _model(path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    numbers = [onnx.numpy_helper.from_array(np.ones(2, np.float32), name) for name in ("a.w", "b.w")]
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["a.w", "b.w"], ["y"])], "g", [], [output], numbers)
    onnx.save(onnx.helper.make_model(graph), path)


def test_only_of_a_set_of_ranks_selects_from_the_merged_state(tmp_path: Path) -> None:
    whole = toc.CheckpointState({"a": torch.arange(8.0), "b": torch.arange(8.0)})
    for n, rank in enumerate(toc.split(whole, toc.PartitionPlan(data_parallel_size=2, zero_stage=1))):
        toc.save(rank, tmp_path / f"rank{n}.ortcp")
    part = toc.load(tmp_path, only=["b"])
    assert list(part.keys()) == ["b"]
    assert torch.equal(part["b"], whole["b"])


def test_a_name_is_a_name_before_it_is_a_pattern() -> None:
    weird = toc.CheckpointState({"w[0]": torch.ones(1), "w0": torch.ones(1)})
    assert list(selected(weird, ["w[0]"])) == ["w[0]"]
    assert list(selected(weird, ["w[0-9]"])) == ["w0"]
    assert list(selected(weird, "w?")) == ["w0"]
    assert list(selected(weird, [])) == []


def test_partitions_and_moments_without_parameters_follow() -> None:
    rank = toc.CheckpointState(
        {"a": torch.ones(1), "b": torch.ones(1)}, partitions={"a": toc.PartitionInfo((2,)), "b": toc.PartitionInfo((2,))}
    )
    assert selected(rank, ["b"]).partitions.keys() == {"b"}
    moments = toc.CheckpointState(optimizer={"group0": toc.OptimizerGroup(1, states={"a": {"momentum0": torch.ones(1)}, "b": {}})})
    assert selected(moments, ["a"]).optimizer["group0"].states.keys() == {"a"}


def test_what_matches_nothing_is_an_error_with_near_names(tmp_path: Path) -> None:
    toc.save(state(), tmp_path / "checkpoint")
    with pytest.raises(toc.CheckpointError, match=r"matches no parameter: 'fc1.wieght' \(did you mean 'fc1.weight'") as caught:
        toc.load(tmp_path / "checkpoint", only=["fc1.bias", "fc1.wieght"])
    assert caught.value.path == str(tmp_path / "checkpoint")
    with pytest.raises(toc.CheckpointError, match=r"matches no parameter: 'layer\.\*'"):
        toc.load(tmp_path / "checkpoint", only=["layer.*"])
    with pytest.raises(toc.CheckpointError, match="matches no parameter: 3"):
        toc.load(tmp_path / "checkpoint", only=[3])  # type: ignore[list-item]


def test_strict_looks_at_what_was_selected(tmp_path: Path) -> None:
    torch.save({"fc1.weight": torch.zeros(2), "fc1.weight_fp16": torch.ones(2).half(), "b": torch.ones(1)}, tmp_path / "x.pt")
    assert list(toc.load(tmp_path / "x.pt", only=["b"], strict=True)) == ["b"]
    with pytest.raises(toc.CheckpointError, match=r"fc1\.weight"):
        toc.load(tmp_path / "x.pt", only=["fc1.weight"], strict=True)


def test_the_device_is_where_every_tensor_is(tmp_path: Path) -> None:
    toc.save(state(), tmp_path / "checkpoint", include_mixed_precision=True)
    there = toc.load(tmp_path / "checkpoint", device="meta")  # a device that every machine has
    labels = [label for label, _ in there.tensors()]
    assert sorted(labels) == sorted(label for label, _ in state().tensors())
    assert {value.device.type for _, value in there.tensors()} == {"meta"}
    assert there["fc1.bias"].shape == (2,)
    assert there._buffers == ()
    assert toc.load(tmp_path / "checkpoint", device=torch.device("cpu")) == toc.load(tmp_path / "checkpoint")
    assert toc.load(tmp_path / "checkpoint", device="cpu")._buffers  # still mapped: nothing was copied


def test_moving_keeps_ties_strings_and_nominal_values() -> None:
    weight = torch.ones(2, 2)
    words = np.array(["a"], dtype=object)
    nothing = torch.empty((), device="meta")
    before = toc.CheckpointState({"a": weight, "b": weight.view(2, 2), "c": weight.clone(), "d": nothing}, {"s": words})
    after = on_device(before, torch.device("meta"))
    assert after["a"] is after["b"]
    assert after["a"] is not after["c"]
    assert after["s"] is words
    assert after["d"] is nothing
    assert before["a"] is weight


@pytest.mark.cuda
def test_a_checkpoint_on_a_gpu_is_saved_again_bit_for_bit(tmp_path: Path) -> None:
    toc.save(state(), tmp_path / "checkpoint")
    there = toc.load(tmp_path / "checkpoint", device="cuda")
    assert {value.device.type for _, value in there.tensors()} == {"cuda"}
    toc.save(there, tmp_path / "again")
    assert toc.load(tmp_path / "again") == toc.load(tmp_path / "checkpoint")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", 1.5])
def test_a_device_that_can_not_be_used_is_refused_before_reading(device: str, tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match=r"device .* can't be used \("):
        toc.load(tmp_path / "not there", device=device)
