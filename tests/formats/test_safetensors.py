"""Our safetensors files against the reference implementation, in both directions."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import torch_ort_ckpt as toc

from ..truth import Truth, fixtures


def adamw() -> toc.CheckpointState:
    return toc.load(Truth("fbv2_ort1_19_2_adamw_full").checkpoint)


@pytest.mark.parametrize("name", [name for name in fixtures("fbv2_ort1_19_2") if "nominal" not in name])
def test_any_other_loader_reads_the_weights(name: str, tmp_path: Path) -> None:
    state = toc.load(Truth(name).checkpoint)
    toc.save(state, tmp_path / "model.safetensors", format="safetensors")
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    expected = {key: value for key, value in state.parameters.items() if isinstance(value, torch.Tensor)}
    assert toc.CheckpointState(found) == toc.CheckpointState(expected)


def test_the_optimizer_is_a_file_of_its_own(tmp_path: Path) -> None:
    toc.save(adamw(), tmp_path / "run.safetensors", format="safetensors")
    assert sorted(place.name for place in tmp_path.iterdir()) == ["run.optimizer.safetensors", "run.safetensors"]
    moments = safetensors.torch.load_file(tmp_path / "run.optimizer.safetensors")
    assert torch.equal(moments["group0/fc1.bias/momentum0"], adamw().optimizer["group0"].states["fc1.bias"]["momentum0"])
    del moments  # Windows deletes no file that is mapped
    toc.save(adamw(), tmp_path / "run.safetensors", format="safetensors", include_optimizer=False)
    assert [place.name for place in tmp_path.iterdir()] == ["run.safetensors"]
    assert not toc.load(tmp_path / "run.safetensors").optimizer


def test_a_foreign_file_loads(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.rand(3), "n": torch.tensor([1]), "w_fp16": torch.rand(3).half()}, tmp_path / "x.safetensors")
    state = toc.load(tmp_path / "x.safetensors")
    assert (list(state.trainable), list(state.frozen), list(state.mixed_precision)) == (["w"], ["n"], ["w"])


def test_tied_weights_follow_the_usual_convention_both_ways(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = nn.Linear(3, 3)
            self.b.weight = self.a.weight

    model, other = Tied(), Tied()
    toc.save(toc.from_torch(model), tmp_path / "ours.safetensors", format="safetensors")
    with safetensors.safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert set(file.keys()) == {"a.weight", "a.bias", "b.bias"}
        assert file.metadata()["b.weight"] == "a.weight"
    safetensors.torch.load_model(other, tmp_path / "ours.safetensors")
    assert torch.equal(other.b.weight, model.a.weight)
    safetensors.torch.save_model(model, str(tmp_path / "theirs.safetensors"))
    state = toc.load(tmp_path / "theirs.safetensors")
    assert state.trainable["a.weight"] is state.trainable["b.weight"]


def test_shards_have_an_index_others_understand(tmp_path: Path) -> None:
    state = adamw()
    toc.save(state, tmp_path, format="safetensors", max_shard_size=400)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in state.parameters.values())
    shards = {name: safetensors.torch.load_file(tmp_path / name) for name in set(index["weight_map"].values())}
    assert len(shards) > 1
    assert all(name in shards[file] for name, file in index["weight_map"].items())
    assert toc.load(tmp_path) == toc.load(tmp_path / "model.safetensors.index.json") == state
    del shards  # Windows deletes no file that is mapped
    toc.save(state, tmp_path, format="safetensors")  # one file again: the shards and indexes go
    assert sorted(place.name for place in tmp_path.iterdir()) == ["model.safetensors", "optimizer.safetensors"]
    toc.save(state, tmp_path, format="safetensors", max_shard_size=400)
    assert not (tmp_path / "model.safetensors").exists()
    assert toc.load(tmp_path) == state


def test_shards_written_by_others_load(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    safetensors.torch.save_file({"b": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": weight_map}))
    assert toc.load(tmp_path).trainable.keys() == {"a", "b"}


def test_files_of_two_saves_are_not_mixed(tmp_path: Path) -> None:
    state = adamw()
    toc.save(state, tmp_path / "a", format="safetensors")
    state.optimizer["group0"].states["fc1.bias"]["momentum0"][0] += 1
    toc.save(state, tmp_path / "b", format="safetensors")
    (tmp_path / "a/optimizer.safetensors").write_bytes((tmp_path / "b/optimizer.safetensors").read_bytes())
    with pytest.raises(toc.CheckpointError, match="belongs to another save"):
        toc.load(tmp_path / "a")
    (tmp_path / "a/optimizer.safetensors").unlink()
    with pytest.raises(toc.CheckpointError, match="missing"):
        toc.load(tmp_path / "a")


def test_an_interrupted_save_is_read_and_repaired(tmp_path: Path) -> None:
    state = adamw()
    toc.save(state, tmp_path, format="safetensors")
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        identity = file.metadata()["torch_ort_ckpt.set"]
    (tmp_path / "optimizer.safetensors").rename(tmp_path / f"optimizer.safetensors.{identity}")  # as if killed before the last rename
    with pytest.warns(toc.CheckpointWarning, match="interrupted"):
        assert toc.load(tmp_path) == state
    assert toc.verify(tmp_path, repair=True).repaired
    assert toc.load(tmp_path) == state
    assert not toc.verify(tmp_path, repair=True).repaired


def bad_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header too small"),
        (b"\xff" * 20, "header too large"),
        (bad_file(b"[1]"), "malformed"),
        (bad_file(b"{"), "malformed"),
        (bad_file(b"[" * 100_000), "malformed"),
        (bad_file(b'{"a":1,"a":1}'), "malformed"),
        (bad_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)), "invalid shape, data type, or offset"),
        (bad_file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4)), "not fully covered"),
        (bad_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)), "invalid offset for tensor `a`"),
        (bad_file({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)), "malformed"),
        (bad_file({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, bytes(1)), "element type 'F4'"),
        (bad_file({"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "unknown variant `X9`"),
        (bad_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(9)), "not fully covered"),
        (bad_file({"__metadata__": {"x": 3}}), "expected a string"),
        (bad_file({"__metadata__": {"torch_ort_ckpt": "[]"}}), "malformed"),
        (bad_file({"__metadata__": {"torch_ort_ckpt": '{"frozen": 3}'}}), "malformed"),
    ],
)
def test_bad_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(toc.CheckpointError, match=message) as caught:
        toc.load(path)
    assert caught.value.path == str(path)


def test_an_index_may_not_leave_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(toc.CheckpointError, match="outside the checkpoint's folder"):
        toc.load(tmp_path)


def test_what_the_format_can_not_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match="nominal"):
        toc.save(toc.load(Truth("fbv2_ort1_19_2_nominal").checkpoint), tmp_path / "n", format="safetensors")
    with pytest.raises(toc.CheckpointError, match="reserved"):
        toc.save(toc.CheckpointState({"__metadata__": torch.zeros(1)}), tmp_path / "n", format="safetensors")
    with pytest.raises(toc.CheckpointError, match="no element type complex128"):
        toc.save(toc.CheckpointState({"c": torch.zeros(1, dtype=torch.complex128)}), tmp_path / "n", format="safetensors")
