"""`runner`: TrainingRunner's folders load bit for bit, are written byte for byte, and can't refer to files outside the folder."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import torch_ort_ckpt as toc
from tests.refusals import why_refused
from torch_ort_ckpt.formats.legacy import moments
from torch_ort_ckpt.formats.onnx import protobuf

from ..strategies import states
from ..truth import Truth, fixtures, raw

NAMES = {"momentum0": "Moment_1", "momentum1": "Moment_2"}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", fixtures("cpp_runner"))
def test_every_fixture_equals_its_truth(name: str, mmap: bool) -> None:
    truth = Truth(name)
    assert toc.detect(truth.checkpoint) == "runner"
    state = toc.load(truth.checkpoint, mmap=mmap)
    flat = dict(state.parameters) | {f"{weight}_fp16": alias for weight, alias in state.mixed_precision.items()}
    group = state.optimizer["group0"]
    for weight, values in group.states.items():
        flat |= {f"{NAMES[moment]}_{weight}": value for moment, value in values.items()}
        if truth.json["optimizer"] == "Adam":
            flat[f"Update_Count_{weight}"] = torch.tensor([group.step + 1])
    if truth.json["optimizer"] == "Lamb":
        flat["Step"] = torch.tensor([group.step + 1])
    assert flat.keys() == truth.json["tensors"].keys()
    for label, entry in truth.json["tensors"].items():
        assert list(flat[label].shape) == entry["shape"]
        assert str(flat[label].dtype) == f"torch.{entry['dtype']}"
        assert raw(flat[label]) == truth.arrays[entry["array"]].tobytes()


def test_properties_have_the_names_used_everywhere() -> None:
    state = toc.load(Truth("cpp_runner_v1_8_1_lamb_mixed").checkpoint)
    assert state.properties == {
        "step": 37,
        "round": 2,
        "weight_update_step": 18,
        "training_data_set_index": 5,
        "loss_scaler_state": "65536 12",
        "optimizer_name": "LambOptimizer",
    }


@pytest.mark.parametrize("name", fixtures("cpp_runner"))
def test_every_file_is_written_byte_for_byte(name: str, tmp_path: Path) -> None:
    truth = Truth(name)
    toc.save(toc.load(truth.checkpoint), tmp_path / "again", format="runner", include_mixed_precision=True)
    for place in truth.checkpoint.iterdir():
        assert (tmp_path / "again" / place.name).read_bytes() == place.read_bytes()


@given(state=states(strings=False))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_state_without_strings_survives(state: toc.CheckpointState) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        refusal = why_refused(state, path, format="runner")
        if refusal is None:
            assert toc.load(path) == state
        else:
            assert "reads as optimizer state" in refusal


def test_steps_of_single_weights_are_counted_as_ort_does(tmp_path: Path) -> None:
    states_ = {"a": {"momentum0": torch.ones(1)}, "b": {"momentum0": torch.ones(1), "step": torch.tensor(3)}}
    state = toc.CheckpointState(
        {"a": torch.ones(1), "b": torch.ones(1)},
        optimizer={"group0": toc.OptimizerGroup(7, states=states_)},
        properties={"optimizer_name": "AdamOptimizer"},
    )
    toc.save(state, tmp_path / "c", format="runner")
    assert toc.load(tmp_path / "c") == state
    counts = {proto.name: {e.key: e.value for e in proto.external_data} for proto in _protos(tmp_path / "c") if "Count" in proto.name}
    data = (tmp_path / "c" / "tensors.bin").read_bytes()
    values = {name: int.from_bytes(data[int(e["offset"]) :][:8], "little") for name, e in counts.items()}
    assert values == {"Update_Count_a": 8, "Update_Count_b": 4}  # the number of the next update
    assert json.loads(_property(tmp_path / "c", moments.NOTE) or "{}") == {}


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "C:x", "\0"])
def test_a_location_that_leaves_the_folder_is_refused(location: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(64))
    _write_one(tmp_path / "c", location, "0", "4")
    with pytest.raises(toc.CheckpointError, match="outside the checkpoint's folder"):
        toc.load(tmp_path / "c")


def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(64))
    _write_one(tmp_path / "c", "tensors.bin", "0", "4")
    os.symlink(tmp_path / "secret", tmp_path / "c" / "tensors.bin")
    with pytest.raises(toc.CheckpointError, match="symbolic link"):
        toc.load(tmp_path / "c")


@pytest.mark.parametrize(
    ("offset", "length", "what"),
    [
        ("-4", "4", "not a number"),
        ("0x0", "4", "not a number"),
        ("9" * 30, "4", "not a number"),
        ("64", "4", "ends at 64"),
        ("9" * 19, "4", "ends at 64"),
        ("0", "8", "holds 8 bytes"),
        ("٣", "4", "not a number"),
    ],
)
def test_hostile_offsets_are_refused(offset: str, length: str, what: str, tmp_path: Path) -> None:
    _write_one(tmp_path / "c", "tensors.bin", offset, length)
    (tmp_path / "c" / "tensors.bin").write_bytes(bytes(64))
    with pytest.raises(toc.CheckpointError, match=what):
        toc.load(tmp_path / "c")


def test_missing_data_is_named(tmp_path: Path) -> None:
    _write_one(tmp_path / "c", "tensors.bin", "0", "4")
    with pytest.raises(FileNotFoundError, match=r"tensors\.bin"):
        toc.load(tmp_path / "c")


def _write_one(folder: Path, location: str, offset: str, length: str) -> None:
    proto = onnx.TensorProto(name="w", dims=[1], data_type=1, data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        proto.external_data.add(key=key, value=value)
    message = proto.SerializeToString()
    folder.mkdir()
    (folder / "tensors.pbseq").write_bytes(protobuf.varint(1) + protobuf.varint(len(message)) + message)
    (folder / "properties.pbseq").write_bytes(b"\0")


def _messages(path: Path) -> list[bytes]:
    data, position = path.read_bytes(), 1
    found = []
    for _ in range(data[0]):
        length = data[position]
        position += 1
        if length >= 0x80:
            length, position = length - 0x80 + (data[position] << 7), position + 1
        found.append(data[position : position + length])
        position += length
    return found


def _protos(folder: Path) -> list[onnx.TensorProto]:
    return [onnx.TensorProto.FromString(message) for message in _messages(folder / "tensors.pbseq")]


def _property(folder: Path, name: str) -> str | None:
    entries = [onnx.StringStringEntryProto.FromString(message) for message in _messages(folder / "properties.pbseq")]
    return next((entry.value for entry in entries if entry.key == name), None)
