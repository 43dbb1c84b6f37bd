"""Weights into and out of ONNX models, checked with the `onnx` package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import torch_ort_ckpt as toc
from torch_ort_ckpt.cli import main
from torch_ort_ckpt.formats.onnx.protobuf import Message
from torch_ort_ckpt.storage.buffers import FileBuffer
from torch_ort_ckpt.storage.hashing import bytes_hash

from ..disks import write_model
from ..truth import Truth, fixtures

ADAMW = Truth("fbv2_ort1_19_2_adamw_full")


@pytest.mark.parametrize("name", [name for name in fixtures("") if (Truth(name).folder / "inference_model.onnx").exists()])
def test_the_exported_model_holds_what_the_checkpoint_holds(name: str) -> None:
    truth = Truth(name)
    found = toc.load(truth.folder / "inference_model.onnx")
    trained = toc.load(truth.checkpoint)
    shared = found.parameters.keys() & trained.parameters.keys()
    assert len(shared) == truth.json["inference_model_initializers_equal"]
    assert toc.CheckpointState({n: found.parameters[n] for n in shared}) == toc.CheckpointState({n: trained.parameters[n] for n in shared})


def model_with(tensors: list[TensorProto], path: Path, **options: object) -> Path:
    graph = helper.make_graph([], "g", [], [], initializer=tensors)
    onnx.save(helper.make_model(graph), path, **options)
    return path


@pytest.mark.parametrize("external", [False, True])
def test_every_type_and_every_way_to_store_it(external: bool, tmp_path: Path) -> None:
    arrays = {
        kind: np.arange(6).reshape(2, 3).astype(kind) for kind in ("f4", "f8", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
    }
    raw = [numpy_helper.from_array(value, f"raw_{kind}") for kind, value in arrays.items()]
    typed = [
        helper.make_tensor(f"typed_{kind}", helper.np_dtype_to_tensor_dtype(value.dtype), (2, 3), value.reshape(-1).tolist())
        for kind, value in arrays.items()
    ]
    options = {"save_as_external_data": True, "size_threshold": 0} if external else {}
    path = model_with(raw + typed, tmp_path / "m.onnx", **options)
    state = toc.load(path)
    for kind, value in arrays.items():
        for way in ("raw", "typed"):
            assert np.array_equal(state.parameters[f"{way}_{kind}"].numpy(), value), (way, kind)


@pytest.mark.parametrize("external", [False, True])
def test_trained_weights_go_into_the_model(external: bool, tmp_path: Path) -> None:
    source = ADAMW.folder / "inference_model.onnx"
    state = toc.load(ADAMW.checkpoint)
    state.trainable["fc1.weight"] = torch.full((16, 12), 7.0)
    big = model_with(
        [numpy_helper.from_array(np.zeros((30, 30), np.float32), "big"), numpy_helper.from_array(np.zeros(2, np.int64), "other")],
        tmp_path / "big.onnx",
    )
    with pytest.warns(toc.CheckpointWarning, match="weights only"):
        toc.save(state, tmp_path / "m.onnx", format="onnx", model=source, external_data=external)
    before, after = onnx.load(source), onnx.load(tmp_path / "m.onnx")
    values = {item.name: numpy_helper.to_array(item) for item in after.graph.initializer}
    assert (values["fc1.weight"] == 7).all()
    assert np.array_equal(values["fc2.weight"], state.trainable["fc2.weight"].numpy())
    assert before.graph.node == after.graph.node
    toc.save(toc.CheckpointState({"big": torch.ones(30, 30)}), big, format="onnx", external_data=external)  # in place
    assert toc.load(big).trainable["big"].sum() == 900
    assert toc.load(big).frozen["other"].tolist() == [0, 0]
    onnx.checker.check_model(onnx.load(big))
    toc.save(toc.CheckpointState({"big": torch.zeros(30, 30)}), big, format="onnx", external_data=external)
    assert toc.load(big).trainable["big"].sum() == 0
    assert len(list(tmp_path.glob("big.onnx*.data"))) == int(external)  # the data of the save before is gone


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = model_with([numpy_helper.from_array(np.zeros((2, 3), np.float32), "w")], tmp_path / "m.onnx")
    for state, message in (
        (toc.CheckpointState({"w": torch.zeros(3, 2)}), r"\(3, 2\)"),
        (toc.CheckpointState({"w": torch.zeros(2, 3).double()}), "of type 11"),
    ):
        with pytest.raises(toc.CheckpointError, match=message):
            toc.save(state, path, format="onnx")
    with (
        pytest.raises(toc.CheckpointError, match="none of the state's weights"),
        pytest.warns(toc.CheckpointWarning, match="no initializer for v"),
    ):
        toc.save(toc.CheckpointState({"v": torch.zeros(1)}), path, format="onnx")
    with pytest.raises(toc.CheckpointError, match="no model to put"):
        toc.save(toc.CheckpointState({"w": torch.zeros(2, 3)}), tmp_path / "new.onnx", format="onnx")


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x3a\xff\xff\xff\xff\x0f", b"hello"])
def test_bad_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(toc.CheckpointError, match=r"m\.onnx"):
        toc.load(tmp_path / "m.onnx")


def test_external_data_stays_in_the_folder(tmp_path: Path) -> None:
    item = TensorProto(name="w", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    item.external_data.add(key="location", value="../secret")
    (tmp_path / "secret").write_bytes(bytes(4))
    (tmp_path / "in").mkdir()
    path = model_with([item], tmp_path / "in/m.onnx")
    with pytest.raises(toc.CheckpointError, match="outside the model's folder"):
        toc.load(path)


def test_on_the_command_line(tmp_path: Path) -> None:
    source = str(ADAMW.folder / "inference_model.onnx")
    assert main(["convert", str(ADAMW.checkpoint), str(tmp_path / "m.onnx"), "--model", source]) == 0
    assert main(["inspect", str(tmp_path / "m.onnx")]) == 0


def test_only_data_files_of_its_own_are_removed(tmp_path: Path) -> None:
    """Those that the replaced model names, and those of saves that were cut short, whose name is the hash of their content."""
    path = tmp_path / "m.onnx"
    write_model(path, toc.CheckpointState({"w": torch.ones(900), "v": torch.ones(900)}))
    mine = tmp_path / f"m.onnx.{'0' * 32}.data"
    mine.write_bytes(b"a user's file")
    abandoned = tmp_path / f"m.onnx.{bytes_hash(b'of a killed save')}.data"
    abandoned.write_bytes(b"of a killed save")
    for value in (2.0, 3.0):
        state = toc.CheckpointState({"w": torch.full((900,), value), "v": torch.full((900,), value)})
        toc.save(state, path, external_data=True)
        assert toc.load(path) == state
        assert len(list(tmp_path.glob("m.onnx.*.data"))) == 2
        assert mine.exists()
    toc.save(state, path)
    assert sorted(tmp_path.iterdir()) == sorted([path, mine])


def test_the_fields_of_a_message_in_their_order(tmp_path: Path) -> None:
    """A number: its value and 0. Everything else: the range of its bytes."""
    number, text, four, eight = b"\x08\x96\x01", b"\x12\x02hi", b"\x1d" + bytes(4), b"\x21" + bytes(8)
    (tmp_path / "message").write_bytes(number + text + four + eight)
    buffer = FileBuffer(tmp_path / "message", mmap=False)
    assert list(Message(buffer, 0, buffer.size, "message").fields()) == [(1, 0, 150, 0), (2, 2, 5, 7), (3, 5, 8, 12), (4, 1, 13, 21)]
