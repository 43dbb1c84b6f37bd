"""Malicious `torch.save` files, and files with content that a checkpoint can't hold: tensors, sizes, names and nesting."""

from __future__ import annotations

import collections
import io
import pickle
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.refusals import refused
from torch_ort_ckpt.checkpoint.state import same_tensor
from torch_ort_ckpt.errors import CorruptFileError, UnsupportedError

from ..fuzz.mutate import limited_memory, peak_memory

NAMES = ["x.pt", "x.ort.pt"]


@pytest.fixture(params=NAMES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def save(weights: Any, path: Path, **more: Any) -> Path:
    torch.save({"model": weights, **more}, path)
    return path


def pickled(path: Path, content: bytes, records: dict[str, bytes] | None = None) -> Path:
    """An archive around a pickle written by hand."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", content)
        for key, data in (records or {}).items():
            file.writestr(f"archive/data/{key}", data)
    return path


# What PyTorch writes


def every_kind() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "plain": base,
        "turned": base.T,
        "part": base[1:3, ::2],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "expanded": torch.tensor([1.0, 2.0]).reshape(2, 1).expand(2, 5),
        "half": base.half(),
        "bfloat16": base.bfloat16(),
        "uint16": torch.arange(5).to(torch.uint16),
        "uint64": torch.arange(5).to(torch.uint64),
        "float8": base.to(torch.float8_e4m3fn),
        "bool": base > 3,
        "complex": torch.complex(base, base),
        "conjugate": torch.complex(base, base).conj(),
        "negative": torch.complex(base, base).conj().imag,
        "parameter": nn.Parameter(base),
        "buffer": nn.Buffer(base),
        "wants a gradient": base.clone().requires_grad_(),
    }


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("mmap", [False, True])
def test_every_kind_of_tensor_comes_back_as_torch_load_has_it(legacy: bool, mmap: bool, tmp_path: Path) -> None:
    values = every_kind()
    if legacy:  # which has no place for these
        for name in ("uint16", "uint64", "float8"):
            values.pop(name)
    torch.save(values, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    found, truth = toc.load(tmp_path / "x.pt", mmap=mmap).parameters, torch.load(tmp_path / "x.pt")
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        assert type(found[name]) is torch.Tensor
        assert not found[name].requires_grad
        assert (found[name].dtype, found[name].shape, found[name].stride()) == (value.dtype, value.shape, value.stride())
        assert same_tensor(found[name], value.detach()), name


def test_a_tensor_with_attributes_is_read(tmp_path: Path) -> None:
    value = torch.ones(3)
    value.origin = "somewhere"  # type: ignore[attr-defined]
    torch.save({"w": value}, tmp_path / "x.pt")
    assert torch.equal(toc.load(tmp_path / "x.pt").trainable["w"], torch.ones(3))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    torch.save({"a": base, "b": base, "c": base[2:]}, tmp_path / "x.pt")
    for mmap in (False, True):
        found = toc.load(tmp_path / "x.pt", mmap=mmap).trainable
        found["a"][3] = 7
        assert found["b"][3] == found["c"][1] == 7


@pytest.mark.parametrize("legacy", [False, True])
def test_data_beside_the_weights_does_not_matter(legacy: bool, tmp_path: Path) -> None:
    content = {
        "state_dict": collections.OrderedDict(w=torch.ones(2)),
        "epoch": 3,
        "flag": True,
        "none": None,
        "set": {1, 2},
        "bytes": b"\x00\xff",
        "counter": collections.Counter("abca"),
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "complex": 1j,
        "storage": torch.ones(2).untyped_storage(),
        "nested": [({"a": [torch.ones(1)]},)],
        "tuples": {("a", "b"): 5},
        7: "number",
    }
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    state = toc.load(tmp_path / "x.pt")
    assert state.properties == {"epoch": 3}
    assert torch.equal(state.trainable["w"], torch.ones(2))


# Tensors that a checkpoint can't hold


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


ODD = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "CSR": lambda: torch.eye(3).to_sparse_csr(),
    "BSR": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": quantized,
}


@pytest.mark.filterwarnings("ignore:.*(beta|prototype).*:UserWarning")
@pytest.mark.parametrize("kind", ODD)
def test_other_layouts_are_refused_by_name(kind: str, path: Path) -> None:
    error = refused(save({"layer.w": ODD[kind]()}, path), "sparse|nested|quantized|NestedTensor", UnsupportedError)
    assert error.remedy


# Sizes


def test_a_stride_of_zero_is_no_bomb(path: Path) -> None:
    save({"w": torch.zeros(1).expand(1 << 50)}, path)
    with limited_memory():
        refused(path, "more than|no `model`", CorruptFileError)


def test_many_names_for_one_tensor_are_no_bomb(path: Path) -> None:
    value = torch.ones(1 << 18)
    save({f"w{n}": value for n in range(1000)}, path)
    refused(path, "bytes from", CorruptFileError)
    save({f"w{n}": value for n in range(60)}, path)
    assert len(toc.load(path).parameters) == 60


def rebuilt(numel: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...], kind: str = "FloatStorage") -> bytes:
    """`{"w": tensor}` as torch.save pickles it, with numbers of our choice."""

    def number(value: int) -> bytes:
        data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
        return b"\x8a" + bytes([len(data)]) + data

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = b"(X\x07\0\0\0storagectorch\n" + kind.encode() + b"\nX\x01\0\0\x000X\x03\0\0\0cpu" + number(numel) + b"tQ"
    return (
        b"\x80\x02}X\x01\0\0\0wctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + number(offset)
        + numbers(size)
        + numbers(stride)
        + b"\x89ccollections\nOrderedDict\n)RtRs."
    )


@pytest.mark.parametrize(
    ("numel", "offset", "size", "stride"),
    [
        (1 << 40, 0, (4,), (1,)),
        (5, 0, (4,), (1,)),
        (-1, 0, (4,), (1,)),
        (4, 1, (4,), (1,)),
        (4, -1, (4,), (1,)),
        (4, 0, (5,), (1,)),
        (4, 0, (4,), (2,)),
        (4, 0, (4,), (-1,)),
        (4, 0, (-4,), (1,)),
        (4, 0, (4,), (1, 1)),
        (4, 0, (1 << 62, 4), (0, 1)),
        (4, 0, (1 << 70,), (0,)),
        (4, 0, (1,) * 65, (1,) * 65),
        (4, 1 << 62, (4,), (1 << 62,)),
        (4, 0, (0, 1 << 62, 1 << 62), (1, 1, 1)),
    ],
)
def test_numbers_that_no_tensor_has_are_refused(
    numel: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...], tmp_path: Path
) -> None:
    path = pickled(tmp_path / "x.pt", rebuilt(numel, offset, size, stride), {"0": bytes(16)})
    with limited_memory():
        refused(path, ".", CorruptFileError)


def test_the_same_numbers_when_right_are_read(tmp_path: Path) -> None:
    path = pickled(tmp_path / "x.pt", rebuilt(4, 1, (3,), (1,)), {"0": struct.pack("<4f", 1, 2, 3, 4)})
    assert toc.load(path).trainable["w"].tolist() == [2, 3, 4]


@pytest.mark.parametrize("kind", ["QInt8Storage", "TypedStorage", "Storage", "Size"])
def test_storages_of_other_types_are_refused(kind: str, tmp_path: Path) -> None:
    refused(pickled(tmp_path / "x.pt", rebuilt(4, 0, (4,), (1,), kind), {"0": bytes(16)}), ".")


def test_a_small_legacy_file_takes_little_memory(tmp_path: Path) -> None:
    """PyTorch allocates the size that the pickle claims before it reads the data."""
    file = io.BytesIO()
    torch.save({"w": torch.arange(4.0)}, file, _use_new_zipfile_serialization=False)
    data = file.getvalue()
    assert data.count(b"K\x04N") == 1
    for number in (b"J" + struct.pack("<i", 1 << 26), b"\x8a\x06" + (1 << 40).to_bytes(6, "little")):
        (tmp_path / "x.pt").write_bytes(data.replace(b"K\x04N", number + b"N"))
        with limited_memory(), peak_memory(True) as peak:
            refused(tmp_path / "x.pt", ".", CorruptFileError)
        assert peak[0] < 1 << 20


@pytest.mark.parametrize("content", [b"\x80\x02]r\x00\x00\x00\x01.", b"\x80\x02]r\xff\xff\xff\x7f.", b"\x80\x02X\xff\xff\xff\x7fab."])
def test_a_short_pickle_takes_little_memory(content: bytes, path: Path) -> None:
    with limited_memory(), peak_memory(True) as peak:
        refused(pickled(path, content), ".")
    assert peak[0] < 4 << 20


def test_keys_whose_hashes_collide_take_little_time(path: Path) -> None:
    """Integers that differ by 2**61 - 1 have one hash: a dictionary of these takes minutes."""
    keys = b"".join(b"\x8a\x0b" + (n * ((1 << 61) - 1)).to_bytes(11, "little", signed=True) + b"N" for n in range(1, 150_000))
    weights = b"X\x05\0\0\0model}X\x01\0\0\0wNs"
    pickled(path, b"\x80\x02}(" + weights + b"X\x01\0\0\0k}(" + keys + b"uu.")
    with pytest.raises(toc.CheckpointError):
        toc.load(path)


def doubling(levels: int) -> bytes:
    """A list that holds a list twice that holds a list twice ..."""
    parts = [b"]q\x00"]
    for level in range(levels):
        parts.append(b"0](" + bytes([0x68, level]) * 2 + b"eq" + bytes([level + 1]))
    return b"".join(parts)


@pytest.mark.parametrize("levels", [40, 90, 200])
def test_lists_of_lists_of_lists_are_no_bomb(levels: int, path: Path) -> None:
    content = b"\x80\x02}(X\x05\0\0\0model}X\x01\0\0\0k" + doubling(levels) + b"u."
    refused(pickled(path, content), ".", CorruptFileError)


def test_a_list_in_itself_is_refused(path: Path) -> None:
    content = b"\x80\x02}(X\x05\0\0\0model}X\x01\0\0\0k]q\x00h\x00au."
    refused(pickled(path, content), "nested too deeply", CorruptFileError)


def test_deep_nesting_is_refused(path: Path) -> None:
    refused(pickled(path, b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."), ".", CorruptFileError)
    refused(pickled(path, b"\x80\x02K\x01" + b"\x85" * 100_000 + b"."), ".", CorruptFileError)


# Names


@pytest.mark.parametrize(
    "optimizer",
    [
        {"state": {0: {5: torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        {"state": {0: {None: torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        {"state": {0: {"exp_avg": "text"}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        {"state": {0: {"exp_avg": [torch.ones(2)]}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        {"state": {0: {"step": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        {"state": {0: {"step": float("nan")}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        {"state": {0: 5}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        {"state": 5, "param_groups": [{"lr": 0.1, "params": [0]}]},
        {"state": {}, "param_groups": [{"lr": torch.ones(2), "params": [0]}]},
        {"state": {}, "param_groups": [{"lr": "fast", "params": [0]}]},
        {"state": {}, "param_groups": [{"lr": 10**400, "params": [0]}]},
        {"state": {}, "param_groups": 7},
        {"state": {}, "param_groups": [{"lr": 0.1, "params": [0], "param_names": [5]}]},
    ],
)
def test_optimizer_states_that_are_none_are_refused(optimizer: Any, tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path / "x.pt", optimizer=optimizer)
    refused(tmp_path / "x.pt", "malformed", CorruptFileError)


def test_hyper_parameters_that_are_no_plain_data_are_named(tmp_path: Path) -> None:
    group = {"lr": torch.tensor(0.25), "betas": (0.9, 0.95), "what": {1, 2}, "list": [torch.ones(2)], 5: 6, "params": [0]}
    optimizer = {"state": {0: {"exp_avg": torch.ones(2), "step": 1}}, "param_groups": [group]}
    save({"w": torch.ones(2)}, tmp_path / "x.pt", optimizer=optimizer)
    with pytest.warns(toc.CheckpointWarning, match="not plain data: 5, list, what"):
        state = toc.load(tmp_path / "x.pt")
    assert state.optimizer["group0"].lr == 0.25
    assert state.optimizer["group0"].hyperparameters == {"betas": [0.9, 0.95]}


def test_our_own_note_with_other_names_is_refused(tmp_path: Path) -> None:
    toc.save(
        toc.CheckpointState({"w": torch.ones(2)}, optimizer={"group0": toc.OptimizerGroup(1, states={"w": {"momentum0": torch.ones(2)}})}),
        tmp_path / "good.pt",
        format="torch",
    )
    for moment in (5, None):
        content = torch.load(tmp_path / "good.pt")
        moments = content["torch_ort_ckpt"]["moments"]["group0"]["w"]
        moments[moment] = moments.pop("momentum0")
        torch.save(content, tmp_path / "x.pt")
        refused(tmp_path / "x.pt", "malformed", CorruptFileError)


# Archives


def test_records_that_overlap_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(64), "b": torch.zeros(64)}, tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        start = archive.start_dir
        first = next(info for info in archive.infolist() if info.filename.endswith("data/0"))
        position = start
        for info in archive.infolist():
            if info.filename.endswith("data/1"):
                struct.pack_into("<I", data, position + 42, first.header_offset)
            position += 46 + len(info.orig_filename) + len(info.extra) + len(info.comment)
    (tmp_path / "x.pt").write_bytes(data)
    refused(tmp_path / "x.pt", "overlap|header", CorruptFileError)


@pytest.mark.parametrize("at", [20, 24])  # both sizes of the first record
def test_a_record_that_claims_gigabytes_is_not_looked_for_in_vain(at: int, tmp_path: Path) -> None:
    """Format detection reads the archive's directory first, and must not trust it either."""
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "x")
    data = bytearray((tmp_path / "x").read_bytes())
    with zipfile.ZipFile(tmp_path / "x") as archive:
        start = archive.start_dir
    for value in (at, 20):
        struct.pack_into("<I", data, start + value, 0xF0000000)
    (tmp_path / "x").write_bytes(data)
    with limited_memory(), peak_memory(True) as peak, pytest.raises(toc.CheckpointError):
        toc.load(tmp_path / "x")
    assert peak[0] < 4 << 20


def test_compressed_records_are_refused(path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(1 << 20)}}, path.with_name("good.pt"))
    with zipfile.ZipFile(path.with_name("good.pt")) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    assert path.stat().st_size < 100_000
    refused(path, "compressed", CorruptFileError)


def test_damaged_data_is_noticed_when_it_is_read(path: Path) -> None:
    save({"w": torch.arange(64.0)}, path)
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(64.0).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match="checksum"):
        toc.load(path, mmap=False)


def test_a_plain_pickle_is_no_checkpoint(path: Path) -> None:
    path.write_bytes(pickle.dumps({"model": {"w": [1.0]}}, 2))
    refused(path, "not a file of torch.save", CorruptFileError)
