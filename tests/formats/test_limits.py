"""Work and memory in proportion to the file, for every reader: shapes, shared bytes, external data, and invalid names."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_ort_ckpt as toc
from tests import refusals
from torch_ort_ckpt.errors import CorruptFileError, UnsupportedError
from torch_ort_ckpt.formats.onnx import protobuf
from torch_ort_ckpt.formats.ort.flatbuffer import Field
from torch_ort_ckpt.formats.shapes import ALWAYS_ALLOWED, MAX_GROWTH, MAX_RANK, element_count

from ..fuzz.mutate import limited_memory
from .hostile import checkpoint, group, module, official, states, tensor

LONG = (1 << 62,) * 20_000
"""A product of a million digits: seconds, and minutes for a file of megabytes."""


def refused(path: Path, message: str, kind: type[toc.CheckpointError] = CorruptFileError, **options: Any) -> toc.CheckpointError:
    return refusals.refused(path, message, kind, **options)


def safetensors(path: Path, header: dict[str, Any], data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def proto(name: str, dims: tuple[int, ...], *fields: bytes) -> bytes:
    """A TensorProto of floats."""
    packed = b"".join(map(protobuf.varint, dims))
    return protobuf._field(1, packed) + b"\x10\x01" + protobuf._field(8, name.encode()) + b"".join(fields)


def raw(data: bytes) -> bytes:
    return protobuf._field(9, data)


def external(**entries: str) -> bytes:
    texts = (
        protobuf._field(1, key.encode()) + protobuf._field(2, value.encode("utf-8", "surrogatepass")) for key, value in entries.items()
    )
    return b"".join(protobuf._field(13, text) for text in texts) + b"\x70\x01"


def model(path: Path, *tensors: bytes) -> Path:
    path.write_bytes(protobuf._field(7, b"".join(protobuf._field(5, item) for item in tensors)))
    return path


def sequence(folder: Path, name: str, *tensors: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    content = b"".join(protobuf.varint(len(item)) + item for item in tensors)
    (folder / name).write_bytes(protobuf.varint(len(tensors)) + content)
    return folder


# Shapes


def long_ort(folder: Path) -> Path:
    (folder / "x").write_bytes(official(checkpoint(module([tensor(b"w", LONG, b"")]))))
    return folder / "x"


LONG_SHAPES: dict[str, Callable[[Path], Path]] = {
    "ort": long_ort,
    "safetensors": lambda t: safetensors(t / "x.safetensors", {"w": {"dtype": "F32", "shape": LONG, "data_offsets": [0, 0]}}),
    "onnx": lambda t: model(t / "x.onnx", proto("w", LONG, raw(b""))),
    "pbseq": lambda t: sequence(t / "x", "paramtrain_tensors.pbseq", proto("w", LONG, raw(b""))),
    "runner": lambda t: sequence(t / "x", "tensors.pbseq", proto("w", LONG, external(location="tensors.bin"))),
}


@pytest.mark.parametrize("format", LONG_SHAPES)
def test_a_shape_of_many_dimensions_is_refused_before_it_is_multiplied(format: str, tmp_path: Path) -> None:
    path = LONG_SHAPES[format](tmp_path)
    assert toc.detect(path) == format
    refused(path, "overflow computing buffer size from shape" if format == "safetensors" else "20000 dimensions")


def test_a_partition_of_many_dimensions_is_refused(tmp_path: Path) -> None:
    text = json.dumps({"w": {"original_dim": LONG, "megatron_row_partition": 0}}).encode()
    entry = [Field(0, "string", b"torch_ort_ckpt.partitions"), Field(1, "string", text)]
    root = checkpoint(module([tensor(b"w")]), Field(3, "table", [Field(2, "tables", [entry])]))
    (tmp_path / "x").write_bytes(official(root))
    refused(tmp_path / "x", "20000 dimensions")


@pytest.mark.parametrize("shape", [[-1], [2.0], [True], ["2"], [None], [[2]], [1 << 70], [10**400], [1] * (MAX_RANK + 1)])
def test_sizes_that_are_none_are_refused(shape: list[Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"size|dimensions"):
        element_count(shape)
    refused(
        safetensors(tmp_path / "x.safetensors", {"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}}, bytes(8)),
        "shape|malformed header",
    )


def test_ordinary_shapes_are_multiplied() -> None:
    assert element_count(()) == 1
    assert element_count((3, 0, 5)) == 0
    assert element_count((1 << 40, 1 << 40)) == 1 << 80
    assert element_count([1] * MAX_RANK) == 1


# Bytes that are used more than once


def tied(folder: Path, names: int, size: int) -> Path:
    metadata = {f"tied{n}": "w" for n in range(names)}
    header = {"__metadata__": metadata, "w": {"dtype": "F32", "shape": [size], "data_offsets": [0, 4 * size]}}
    return safetensors(folder / "x.safetensors", header, bytes(4 * size))


def test_tied_safetensors_do_not_multiply(tmp_path: Path) -> None:
    """A file of four megabytes that would take 78 GiB when converted."""
    path = tied(tmp_path, 40_000, 1 << 19)
    error = refused(path, "bytes from .* bytes on disk")
    assert str(MAX_GROWTH) in str(error)
    with pytest.raises(toc.CheckpointError, match="on disk"):
        toc.convert(path, tmp_path / "y.ortckpt")
    assert not toc.verify(path)
    assert not (tmp_path / "y.ortckpt").exists()


def test_weights_tied_as_models_tie_them_are_read(tmp_path: Path) -> None:
    state = toc.load(tied(tmp_path, 40, 1 << 20))  # layers shared forty times, more than 64 MiB in all
    assert len(state.trainable) == 41
    assert len({value.data_ptr() for value in state.trainable.values()}) == 1
    small = toc.load(tied(tmp_path, ALWAYS_ALLOWED // 4000 - 1, 1000))
    assert len(small.trainable) == ALWAYS_ALLOWED // 4000


def test_external_data_used_again_and_again_does_not_multiply(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes((1 << 20) + 1))
    shape = (1 << 18,)
    path = model(tmp_path / "x.onnx", *(proto(f"w{n}", shape, external(location="data", offset="1")) for n in range(1000)))
    with limited_memory():
        refused_at(path, "used too often")
    path = model(tmp_path / "x.onnx", *(proto(f"w{n}", shape, external(location="data", offset="1")) for n in range(3)))
    assert len(toc.load(path).trainable) == 3


def test_one_data_file_under_many_names_is_opened_once(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(1 << 20))
    names = ("/".join(["."] * n + ["data"]) for n in range(2000))
    path = model(tmp_path / "x.onnx", *(proto(f"w{n}", (1,), external(location=name)) for n, name in enumerate(names)))
    with limited_memory():
        assert len(toc.load(path, mmap=False)._buffers) == 2


def refused_at(path: Path, message: str, kind: type[toc.CheckpointError] = CorruptFileError) -> toc.CheckpointError:
    """Refused; the error may name the file beside it."""
    with pytest.raises(kind, match=message) as caught:
        toc.load(path)
    assert caught.value.field
    assert not toc.verify(path)
    return caught.value


# External data of models


@pytest.mark.parametrize("location", ["a\0b", "\0", "../data", "/etc/passwd", "", "\ud800", "x" * 5000, "loop"])
def test_locations_that_are_none_are_refused(location: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    refused_at(model(tmp_path / "x.onnx", proto("w", (2,), external(location=location))), ".", toc.CheckpointError)


@pytest.mark.parametrize("key", ["offset", "length"])
@pytest.mark.parametrize("value", ["9" * 5000, "9" * 19, "-1", "1e3", "0x10", " 8", "", "٣", "1_0", "²"])
def test_numbers_that_are_none_are_refused(key: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(64))
    refused_at(model(tmp_path / "x.onnx", proto("w", (2,), external(location="data", **{key: value}))), ".")
    folder = sequence(tmp_path / "r", "tensors.pbseq", proto("w", (2,), external(location="tensors.bin", **{key: value})))
    (folder / "tensors.bin").write_bytes(bytes(64))
    refused_at(folder, ".")


@pytest.mark.parametrize("length", [0, 4, 9, 16])
def test_a_length_that_is_not_the_shape_s_is_refused(length: int, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(64))
    error = refused_at(model(tmp_path / "x.onnx", proto("w", (2,), external(location="data", length=str(length)))), f"{length} bytes")
    assert error.field == "w"
    assert toc.load(model(tmp_path / "x.onnx", proto("w", (2,), external(location="data", length="8")))).trainable["w"].numel() == 2


# Names and steps


@pytest.mark.parametrize("numbers", [(1.0, 1.0), (2.5,), (float("nan"),), (float("inf"),)])
def test_a_step_of_one_weight_that_is_no_number_is_refused(numbers: tuple[float, ...], tmp_path: Path) -> None:
    shape, data = (len(numbers),), struct.pack(f"<{len(numbers)}f", *numbers)
    moments = states(b"w", tensor(b"momentum0"), tensor(b"step", shape, data))
    (tmp_path / "a").write_bytes(official(checkpoint(module([tensor(b"w")]), Field(2, "tables", [group(states=[moments])]))))
    assert refused_at(tmp_path / "a", "not one whole number").field == "optimizer/group0/w/step"
    folder = sequence(tmp_path / "b", "optim_group0_step_tensors.pbseq", proto("w", shape, raw(data)))
    assert refused_at(folder, "not one whole number").field == "optimizer/group0/w/step"


NAMES: dict[str, Callable[[Any], toc.CheckpointState]] = {
    "trainable": lambda name: toc.CheckpointState({name: torch.ones(2)}),
    "frozen": lambda name: toc.CheckpointState(frozen={name: torch.ones(2)}),
    "property": lambda name: toc.CheckpointState(properties={name: 1}),
    "group": lambda name: toc.CheckpointState(optimizer={name: toc.OptimizerGroup(1)}),
    "parameter of a group": lambda name: toc.CheckpointState(optimizer={"g": toc.OptimizerGroup(1, states={name: {}})}),
    "moment": lambda name: toc.CheckpointState(
        {"w": torch.ones(2)}, optimizer={"g": toc.OptimizerGroup(1, states={"w": {name: torch.ones(2)}})}
    ),
}
WRITABLE = ("ort", "safetensors", "runner", "pbseq", "ortcp", "torch", "dcp")


@pytest.mark.parametrize("format", WRITABLE)
@pytest.mark.parametrize("where", NAMES)
@pytest.mark.parametrize("name", [5, None, b"w", ("w",)])
def test_names_that_are_not_text_are_not_written(name: Any, where: str, format: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="not text"):
        toc.save(NAMES[where](name), tmp_path / "x", format=format)
    assert list(tmp_path.iterdir()) == []


LONE = "a\ud800b"
TEXTS = {
    **{where: make(LONE) for where, make in NAMES.items()},
    "text of a property": toc.CheckpointState(properties={"p": LONE}),
    "string tensor": toc.CheckpointState({"s": np.array([LONE], object)}),
    "hyper-parameter": toc.CheckpointState(optimizer={"g": toc.OptimizerGroup(1, hyperparameters={"h": LONE})}),
}


@pytest.mark.parametrize("format", WRITABLE)
@pytest.mark.parametrize("where", TEXTS)
def test_lone_surrogates_come_back_or_are_refused(where: str, format: str, tmp_path: Path) -> None:
    state = TEXTS[where]
    try:
        toc.save(state, tmp_path / "x", format=format)
    except toc.CheckpointError as error:
        str(error).encode()
        assert not [place for place in tmp_path.rglob("*") if place.is_file()]
        return
    again = toc.load(tmp_path / "x", format=format)
    assert again == state
    repr(again).encode()
    str(toc.diff(again, toc.CheckpointState())).encode()


def test_names_of_moments_in_our_own_notes_must_be_text(tmp_path: Path) -> None:
    state = toc.CheckpointState({"w": torch.ones(2)})
    state.optimizer["group0"] = toc.OptimizerGroup(3, states={"w": {"momentum0": torch.ones(2)}})
    toc.save(state, tmp_path / "x.safetensors", format="safetensors")
    place = tmp_path / "x.optimizer.safetensors"
    length = int.from_bytes(place.read_bytes()[:8], "little")
    for name in (5, None, ["a"], {}):
        header = json.loads(place.read_bytes()[8 : 8 + length])
        note = json.loads(header["__metadata__"]["torch_ort_ckpt"])
        note["keys"] = {key: ["group0", "w", name] for key in note["keys"]}
        header["__metadata__"]["torch_ort_ckpt"] = json.dumps(note)
        (tmp_path / "y.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes())
        safetensors(tmp_path / "y.optimizer.safetensors", header, place.read_bytes()[8 + length :])
        with pytest.raises(CorruptFileError, match=r"not text|malformed"):
            toc.load(tmp_path / "y.safetensors")
