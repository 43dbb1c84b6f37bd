"""`pbseq`: what ORT 1.14 and 1.15 wrote loads bit for bit, and what we write is byte for byte what they would write."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_ort_ckpt as toc
from tests.refusals import why_refused
from torch_ort_ckpt.errors import UnsupportedError
from torch_ort_ckpt.formats.onnx import protobuf
from torch_ort_ckpt.storage.buffers import FileBuffer

from ..strategies import states
from ..truth import Truth, fixtures

checked = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", fixtures("pbseq"))
def test_every_fixture_equals_its_truth(name: str, mmap: bool) -> None:
    truth = Truth(name)
    assert toc.detect(truth.checkpoint) == "pbseq"
    truth.assert_equal(toc.load(truth.checkpoint, mmap=mmap))


@pytest.mark.parametrize("name", [name for name in fixtures("pbseq") if not name.endswith(("dtypes", "initial", "trainable"))])
def test_files_of_tensors_are_byte_for_byte_what_ort_wrote(name: str, tmp_path: Path) -> None:
    """Not so for what artifact generation wrote (in the order of the model, with typed fields), nor for properties (in no order)."""
    truth = Truth(name)
    toc.save(toc.load(truth.checkpoint), tmp_path / "again", format="pbseq")
    written = {place.name: place.read_bytes() for place in (tmp_path / "again").iterdir()}
    theirs = {place.name: place.read_bytes() for place in truth.checkpoint.iterdir()}
    assert written.keys() == theirs.keys()
    for file in written:
        if file.endswith("_tensors.pbseq"):
            assert written[file] == theirs[file]
        else:
            assert sorted(written[file]) == sorted(theirs[file])


@given(state=states(), mmap=st.booleans())
@checked
def test_any_state_survives(state: toc.CheckpointState, mmap: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        toc.save(state, path, format="pbseq", include_mixed_precision=True, durable=False)
        assert toc.load(path, mmap=mmap) == state


@given(state=states(several_groups=True))
@checked
def test_several_groups_survive_when_kept(state: toc.CheckpointState) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        refusal = why_refused(state, path, format="pbseq", groups="keep")
        if refusal is None:
            assert toc.load(path) == state
        else:
            assert "file name" in refusal


def test_groups_and_moments_with_underscores_keep_their_names(tmp_path: Path) -> None:
    moments = {"w": {"momentum0": torch.ones(2), "row_mean": torch.zeros(2)}}
    state = toc.CheckpointState(optimizer={"a": toc.OptimizerGroup(3, states=moments), "b_c": toc.OptimizerGroup(4, states=moments)})
    toc.save(state, tmp_path / "c", format="pbseq", groups="keep")
    assert toc.load(tmp_path / "c") == state


def test_a_name_that_would_read_as_another_group_is_refused(tmp_path: Path) -> None:
    groups = {"a": toc.OptimizerGroup(states={"w": {"b_m": torch.ones(1)}}), "a_b": toc.OptimizerGroup(states={"w": {"n": torch.ones(1)}})}
    with pytest.raises(UnsupportedError, match="another group"):
        toc.save(toc.CheckpointState(optimizer=groups), tmp_path / "c", format="pbseq", groups="keep")
    assert not list(tmp_path.iterdir())


def test_a_tensor_beyond_the_limit_of_protobuf_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    huge = torch.zeros(1).expand(1 << 29)  # 2 GiB to write, 4 bytes of memory
    with pytest.raises(UnsupportedError, match="2 GiB"):
        toc.save(toc.CheckpointState(trainable={"w": huge}), tmp_path / "c", format="pbseq")
    assert not list(tmp_path.iterdir())


ELEMENTS = {
    onnx.TensorProto.FLOAT: np.float32([1.5, -0.0, np.inf]),
    onnx.TensorProto.DOUBLE: np.float64([1.5, -0.0, np.nan]),
    onnx.TensorProto.INT8: np.int8([-128, 127, -1]),
    onnx.TensorProto.UINT8: np.uint8([0, 255, 7]),
    onnx.TensorProto.INT16: np.int16([-32768, 32767, 300]),
    onnx.TensorProto.UINT16: np.uint16([65535, 0, 300]),
    onnx.TensorProto.INT32: np.int32([-(2**31), 2**31 - 1, -5]),
    onnx.TensorProto.UINT32: np.uint32([2**32 - 1, 0, 5]),
    onnx.TensorProto.INT64: np.int64([-(2**63), 2**63 - 1, -1]),
    onnx.TensorProto.UINT64: np.uint64([2**64 - 1, 0, 1]),
    onnx.TensorProto.BOOL: np.array([True, False, True]),
    onnx.TensorProto.FLOAT16: np.float16([1.5, -2, np.inf]),
}


@pytest.mark.parametrize("kind", ELEMENTS)
@pytest.mark.parametrize("raw", [True, False])
def test_onnx_s_own_tensors_are_read_in_raw_and_typed_fields(kind: int, raw: bool, tmp_path: Path) -> None:
    values = ELEMENTS[kind]
    proto = onnx.helper.make_tensor("w", kind, [3, 1], values.tobytes() if raw else values.tolist(), raw=raw)
    (value,) = _read_back(proto, tmp_path).values()
    assert value.numpy().dtype == values.dtype
    assert value.shape == (3, 1)
    assert value.numpy().tobytes() == values.tobytes()


def test_bfloat16_and_float8_are_read_from_int32_data(tmp_path: Path) -> None:
    for kind, dtype, bits in ((16, torch.bfloat16, [0x3F80, 0xFF80]), (17, torch.float8_e4m3fn, [0x38, 0xFF])):
        (value,) = _read_back(onnx.TensorProto(name="w", dims=[2], data_type=kind, int32_data=bits), tmp_path).values()
        assert value.dtype == dtype
        assert value.view(torch.int16 if kind == 16 else torch.uint8).tolist() == [b - (1 << 16) if b > 0x7FFF else b for b in bits]


def test_onnx_reads_what_we_write() -> None:
    state = toc.load(Truth("pbseq_ort1_15_1_dtypes").checkpoint)
    for name, value in state.parameters.items():
        head, tail = protobuf.encode_tensor(name, value, "x", "w")
        proto = onnx.TensorProto.FromString(head + (b"" if tail is None or not tail.numel() else bytes(_bytes(tail))))
        assert proto.name == name
        assert list(proto.dims) == list(value.shape)
        if value.dtype not in (torch.bfloat16,):
            assert onnx.numpy_helper.to_array(proto).tobytes() == value.numpy().tobytes()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "middle of a number"),
        (b"\xff" * 11, "more than 64 bits"),
        (b"\xff\xff\xff\xff\x0f", "claims 4294967295 messages"),
        (b"\x01\xff\xff\xff\xff\x0f", "claims 4294967295 bytes"),
        (b"\x01\x02\x08", "claims 2 bytes"),
        (b"\x00\x00", "after the last message"),
        (b"\x01\x02\x0b\x00", "wire type 3"),
        (b"\x01\x02\x00\x00", "field number 0"),
        (b"\x01\x03\x4a\xff\x01", "field 9 claims 255 bytes"),
        (b"\x01\x0b\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "negative size"),
        (b"\x01\x0c\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x10\x01", "its shape and type need"),
    ],
)
def test_hostile_numbers_and_lengths_are_refused(content: bytes, what: str, tmp_path: Path) -> None:
    (tmp_path / "paramtrain_tensors.pbseq").write_bytes(content)
    with pytest.raises(toc.CheckpointError, match=what) as caught:
        toc.load(tmp_path)
    assert caught.value.path == str(tmp_path / "paramtrain_tensors.pbseq")


def test_external_data_has_no_place_in_these_files(tmp_path: Path) -> None:
    proto = onnx.TensorProto(name="w", dims=[1], data_type=1, data_location=onnx.TensorProto.EXTERNAL)
    proto.external_data.add(key="location", value="../secret")
    with pytest.raises(toc.CheckpointError, match="external data"):
        _read_back(proto, tmp_path)


def test_elements_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match="does not fit int8"):
        _read_back(onnx.TensorProto(name="w", dims=[1], data_type=3, int32_data=[300]), tmp_path)


def _read_back(proto: onnx.TensorProto, folder: Path) -> dict[str, torch.Tensor]:
    message = proto.SerializeToString()
    (folder / "paramtrain_tensors.pbseq").write_bytes(protobuf.varint(1) + protobuf.varint(len(message)) + message)
    return dict(protobuf.tensor(item) for item in protobuf.sequence(FileBuffer(folder / "paramtrain_tensors.pbseq")))


def _bytes(value: torch.Tensor) -> memoryview:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().data
