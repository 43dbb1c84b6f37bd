"""DCP folders: everything that PyTorch writes is read, and a malicious folder can't run code, give wrong data or exhaust memory."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import torch_ort_ckpt as toc
from tests.refusals import refused
from tests.traps import Trap
from torch_ort_ckpt.errors import CorruptFileError, UnsupportedError

from ..fuzz.mutate import limited_memory, peak_memory
from ..truth import DATA


def archive(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class Folder:
    """A DCP folder put together by hand."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        self.index = Metadata({}, {}, {}, StorageMeta("somewhere", "one", None, []))
        self.data = b""

    def tensor(self, name: Any, shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], torch.Tensor]], **properties: Any) -> Any:
        described = [ChunkStorageMetadata(torch.Size(offset), value.shape) for offset, value in chunks]
        dtype = properties.pop("dtype", chunks[0][1].dtype if chunks else torch.float32)
        self.index.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(dtype, **properties), torch.Size(shape), described)
        for offset, value in chunks:
            self.item(MetadataIndex(name, offset), archive(value))
        return self

    def item(self, key: MetadataIndex, content: bytes, **more: Any) -> None:
        self.index.storage_data[key] = _StorageInfo("__0_0.distcp", len(self.data), len(content), **more)
        self.data += content

    def write(self, index: bytes | None = None) -> Path:
        (self.path / "__0_0.distcp").write_bytes(self.data)
        (self.path / ".metadata").write_bytes(pickle.dumps(self.index) if index is None else index)
        return self.path


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "c")


# What PyTorch writes


@pytest.fixture(scope="module")
def fully_sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fsdp")
    run = subprocess.run(
        [sys.executable, "-m", "tests.formats.dcp_worker", str(place)], capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return place


@pytest.mark.posix  # its ranks are forked
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_fsdp2_wrote_over_several_ranks_is_read(ranks: int, fully_sharded: Path) -> None:
    with pytest.warns(toc.CheckpointWarning, match=r"not tensors are left out: epoch, optim\.param_groups"):
        state = toc.load(fully_sharded / f"ranks{ranks}")
    truth = torch.load(fully_sharded / f"truth{ranks}.pt")
    assert state.parameters.keys() == truth.keys()
    for name, value in truth.items():
        assert torch.equal(state.parameters[name], value), name
    assert state.step == 2
    assert {name for states in state.optimizer["group0"].states.values() for name in states} == {"momentum0", "momentum1"}


def test_plain_dictionaries_and_nested_lists_are_read(tmp_path: Path) -> None:
    content = {
        "model": {"w": torch.rand(3, 4), "layers": [{"b": torch.rand(2)}, {"b": torch.rand(2)}], "half": torch.rand(3).bfloat16()},
        "flags": {"on": torch.tensor(True)},
        "epoch": 3,
        "note": "text",
    }
    dcp.save(content, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.warns(toc.CheckpointWarning, match=r"left out") as seen:
        state = toc.load(tmp_path / "c")
    assert ["epoch, note" in str(item.message) for item in seen].count(True) == 1
    assert torch.equal(state.trainable["w"], content["model"]["w"])
    assert torch.equal(state.trainable["layers.1.b"], content["model"]["layers"][1]["b"])
    assert torch.equal(state.trainable["half"], content["model"]["half"])


@pytest.mark.parametrize("element", [torch.float16, torch.float64, torch.uint8, torch.bool, torch.int64, torch.complex64, torch.uint16])
def test_every_element_type_is_read(element: torch.dtype, tmp_path: Path) -> None:
    value = torch.tensor([0, 1, 1]).to(element)
    dcp.save({"w": value}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(toc.load(tmp_path / "c").parameters["w"], value)


@pytest.mark.parametrize("per_file", [True, False])
def test_one_file_per_rank_or_per_tensor(per_file: bool, tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "c", single_file_per_rank=per_file)
    dcp.save({"a": torch.ones(3), "b": torch.zeros(2, 2)}, storage_writer=writer, no_dist=True)
    assert set(toc.load(tmp_path / "c").parameters) == {"a", "b"}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("generation", ["2.0", "2.3", "now"])
def test_indexes_of_older_releases_are_read(generation: str, protocol: int, folder: Folder) -> None:
    """2.0 had TensorProperties elsewhere and neither `storage_meta` nor `transform_descriptors`; 2.3 has no `version`."""
    folder.tensor("w", (2, 3), [((0, 0), torch.ones(2, 3))])
    if generation != "now":
        for info in folder.index.storage_data.values():
            del info.__dict__["transform_descriptors"]
        del folder.index.__dict__["version"]
    if generation == "2.0":
        del folder.index.__dict__["storage_meta"]
        index = _renamed(folder.index, protocol)
    else:
        index = pickle.dumps(folder.index, protocol)
    assert torch.equal(toc.load(folder.write(index)).trainable["w"], torch.ones(2, 3))


def _renamed(index: Metadata, protocol: int) -> bytes:
    """The pickle with TensorProperties and its encoding where PyTorch 2.0 had them."""
    from torch.distributed._shard.sharded_tensor import metadata as old

    encoding = old.MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    for entry in index.state_dict_metadata.values():
        properties = entry.properties
        entry.properties = old.TensorProperties(properties.dtype, properties.layout, False, torch.contiguous_format, False)
    data = pickle.dumps(index, protocol)
    assert type(encoding).__module__.encode() in data
    return data


# Code


def test_a_number_as_a_name_does_not_lead_to_an_unpickler(folder: Folder, tmp_path: Path) -> None:
    """PyTorch makes text of the name 5, and finds the entry "5": bytes, which it unpickles."""
    folder.tensor("5", (2,), [((0,), torch.zeros(2))])
    folder.index.state_dict_metadata[5] = folder.index.state_dict_metadata.pop("5")
    folder.index.state_dict_metadata["5"] = BytesStorageMetadata()
    folder.item(MetadataIndex("5"), archive(Trap(tmp_path / "sprung")))
    refused(folder.write(), "a name that is not text")
    assert not (tmp_path / "sprung").exists()


def test_an_index_can_not_reach_a_class(folder: Folder) -> None:
    """BUILD with `(None, {...})` on a class sets attributes of the class itself."""
    folder.tensor("w", (2,), [((0,), torch.zeros(2))])
    good = pickle.dumps(folder.index, 2)
    for kind in (b"torch.distributed.checkpoint.metadata\nStorageMeta", b"torch.distributed.checkpoint.filesystem\n_StoragePrefix"):
        attack = b"\x80\x02c" + kind + b"\nN}X\x06\x00\x00\x00pwned!K\x01s\x86b0"
        error = refused(folder.write(attack + good[2:]), "not a new object", CorruptFileError)
        assert error.path == str(folder.path / ".metadata")
    assert not hasattr(metadata.StorageMeta, "pwned!")
    assert not hasattr(filesystem._StoragePrefix, "pwned!")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04cos\nsystem\n\x8c\x02id\x85R.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
        b"\x80\x04cbuiltins\neval\n.",
        b"\x80\x04ctorch\nload\n.",
        b"\x80\x04ctorch.storage\n_load_from_bytes\nC\x01x\x85R.",
        b"\x80\x04ccollections\nOrderedDict.fromkeys\n.",
    ],
)
def test_other_names_are_refused_by_name(content: bytes, folder: Folder) -> None:
    error = refused(folder.write(content), "its index refers to", UnsupportedError)
    assert "runs no code" in str(error)


def test_what_is_not_a_tensor_is_never_opened(folder: Folder, tmp_path: Path) -> None:
    folder.tensor("w", (2,), [((0,), torch.ones(2))])
    folder.index.state_dict_metadata["extra"] = BytesStorageMetadata()
    folder.item(MetadataIndex("extra"), archive(Trap(tmp_path / "sprung")))
    with pytest.warns(toc.CheckpointWarning, match="left out: extra"):
        assert torch.equal(toc.load(folder.write()).trainable["w"], torch.ones(2))
    assert not (tmp_path / "sprung").exists()


def test_code_in_a_chunk_is_not_run(folder: Folder, tmp_path: Path) -> None:
    folder.tensor("w", (2,), [((0,), torch.ones(2))])
    folder.data = b""
    folder.item(MetadataIndex("w", (0,)), archive(Trap(tmp_path / "sprung")))
    refused(folder.write(), "unsafe unpickling", UnsupportedError)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("format", ["dcp", "torch"])
def test_no_unpickler_is_called_at_all(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = toc.load(DATA / "fbv2_ort1_19_2_adamw_full" / "checkpoint")
    toc.save(state, tmp_path / "c", format=format)

    def called(*_: Any, **__: Any) -> None:
        raise AssertionError("an unpickler")

    for module, names in ((pickle, ("load", "loads", "Unpickler", "_Unpickler")), (torch, ("load",)), (dcp, ("load",))):
        for name in names:
            monkeypatch.setattr(module, name, called)
    monkeypatch.setattr(torch._weights_only_unpickler, "load", called)
    for mmap in (True, False):
        assert toc.load(tmp_path / "c", format=format, mmap=mmap) == state


# Wrong claims about the data


TWO = torch.ones(2)
CHUNKS: dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], torch.Tensor]]]] = {
    "none": ((4,), []),
    "a gap at the end": ((4,), [((0,), TWO)]),
    "a gap in the middle": ((6,), [((0,), TWO), ((4,), TWO)]),
    "an overlap": ((4,), [((0,), torch.ones(3)), ((2,), TWO)]),
    "an overlap and a gap": ((4,), [((0,), TWO), ((1,), TWO)]),
    "outside": ((4,), [((0,), TWO), ((3,), TWO)]),
    "too many": ((2,), [((0,), TWO), ((2,), TWO)]),
    "boxes that add up": ((2, 2), [((0, 0), torch.ones(2, 1)), ((0, 0), torch.ones(1, 2))]),
    "another rank": ((2, 1), [((0,), TWO)]),
    "boxes over boxes": ((4, 4), [((0, 0), torch.ones(4, 3)), ((0, 2), torch.ones(2, 2))]),
}


@pytest.mark.parametrize("what", CHUNKS)
def test_chunks_that_do_not_cover_the_tensor_are_refused(what: str, folder: Folder) -> None:
    shape, chunks = CHUNKS[what]
    error = refused(folder.tensor("w", shape, chunks).write(), "chunk", CorruptFileError)
    assert error.field == "w"


def test_boxes_that_cover_the_tensor_are_put_together(folder: Folder) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    boxes = [((0, 0), whole[:1]), ((1, 0), whole[1:, :2]), ((1, 2), whole[1:3, 2:]), ((3, 2), whole[3:, 2:])]
    state = toc.load(folder.tensor("w", (4, 6), [(offset, value.contiguous()) for offset, value in boxes]).write())
    assert torch.equal(state.trainable["w"], whole)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, dtype=torch.int32),
        torch.ones(3),
        torch.ones(2, 1),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse()[0],
        {"w": torch.ones(2)},
        [1],
        None,
    ],
    ids=["type", "shape", "rank", "no data", "sparse", "a dictionary", "a list", "nothing"],
)
def test_a_chunk_that_is_something_else_is_refused(value: Any, folder: Folder) -> None:
    folder.tensor("w", (2,), [((0,), torch.ones(2))])
    folder.data = b""
    folder.item(MetadataIndex("w", (0,)), archive(value))
    refused(folder.write(), ".")


def test_damaged_data_is_noticed(folder: Folder) -> None:
    folder.tensor("w", (64,), [((0,), torch.arange(64.0))])
    at = folder.data.index(torch.arange(64.0).numpy().tobytes())
    folder.data = folder.data[: at + 9] + b"\x55" + folder.data[at + 10 :]
    refused(folder.write(), "checksum", CorruptFileError)


def test_checkpoints_without_checksums_are_read(folder: Folder) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        folder.tensor("w", (64,), [((0,), torch.arange(64.0))])
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(toc.load(folder.write()).trainable["w"], torch.arange(64.0))


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "sub/x.distcp", "..", ".", "", "a\\b", "a\0b"])
def test_files_outside_the_folder_are_refused(name: str, folder: Folder) -> None:
    folder.tensor("w", (2,), [((0,), torch.ones(2))])
    next(iter(folder.index.storage_data.values())).relative_path = name
    refused(folder.write(), "outside the folder", CorruptFileError)


@pytest.mark.parametrize("key", ["offset", "length"])
@pytest.mark.parametrize("value", [-1, 1 << 62, 1 << 64, 10**100, "5", 2.5, None, True, []])
def test_places_that_are_none_are_refused(key: str, value: Any, folder: Folder) -> None:
    folder.tensor("w", (2,), [((0,), torch.ones(2))])
    setattr(next(iter(folder.index.storage_data.values())), key, value)
    refused(folder.write(), ".")


def test_extensions_are_named(folder: Folder) -> None:
    folder.tensor("w", (2,), [((0,), torch.ones(2))])
    next(iter(folder.index.storage_data.values())).transform_descriptors = ["zstd"]
    refused(folder.write(), "extension of DCP", UnsupportedError)


# Fields that PyTorch itself fails on


def _properties(**values: Any) -> Any:
    """TensorProperties with arbitrary fields in its pickle."""

    class Odd:
        def __reduce__(self) -> Any:
            state = (values.get("dtype", torch.float32), torch.strided, False, values.get("memory_format", 0), False)
            return TensorProperties, (), state

    return Odd()


def test_a_bad_memory_format_or_device_does_not_matter_or_is_our_error(folder: Folder) -> None:
    folder.tensor("w", (2,), [((0,), torch.ones(2))])
    entry = folder.index.state_dict_metadata["w"]
    for value in (17, "what", None, [[]]):
        entry.properties = _properties(memory_format=value)
        assert torch.equal(toc.load(folder.write()).trainable["w"], torch.ones(2))
    entry.properties = _properties()
    good = pickle.dumps(folder.index, 2)
    device = b"ctorch\ndevice\nX\x07\x00\x00\x00no such\x85R0"  # created and dropped: only a real unpickler would fail
    assert torch.equal(toc.load(folder.write(good[:2] + device + good[2:])).trainable["w"], torch.ones(2))
    for kind in (torch.Size([2]), "float32", None, 5, torch.strided):
        entry.properties = _properties(dtype=kind)
        refused(folder.write(), "element type")


@pytest.mark.parametrize("shape", [(-2,), (1 << 64,), (1 << 62, 1 << 62), (2.0,), ("2",), (0, 1 << 62, 1 << 62), (1,) * 65, None])
def test_shapes_that_are_none_are_refused(shape: Any, folder: Folder) -> None:
    folder.tensor("w", (2,), [((0,), torch.ones(2))])
    folder.index.state_dict_metadata["w"].size = shape
    assert refused(folder.write(), ".").field == "w"


@pytest.mark.parametrize("step", [torch.tensor(2.5), torch.tensor(float("nan")), torch.ones(2), torch.tensor(1j)])
def test_a_step_that_is_no_number_is_refused(step: torch.Tensor, tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(2)}, "optim": {"state": {"w": {"step": step}}}}, checkpoint_id=tmp_path / "c", no_dist=True)
    refused(tmp_path / "c", "not one whole number", CorruptFileError)


# Memory and time


def test_a_short_index_takes_little_memory(folder: Folder) -> None:
    """Python's own unpickler allocates a memo table as large as the largest index: 2 GB for nine bytes."""
    notes = [b"\x80\x04}r" + struct.pack("<I", number) + b"." for number in (1 << 24, 1 << 27, (1 << 32) - 1)]
    lengths = [b"\x80\x04" + code + b"\xff\xff\xff\x7f." for code in (b"B", b"X", b"\x8b")]
    for content in notes + lengths:
        with limited_memory(), peak_memory(True) as peak:
            refused(folder.write(content), ".")
        assert peak[0] < 1 << 20


def test_lists_of_lists_of_lists_take_little_time(folder: Folder) -> None:
    """Each holds the one before it twice: 2**200 elements in a kilobyte."""
    content = b"\x80\x04]\x94" + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(200)) + b"."
    refused(folder.write(content), "not DCP's index", CorruptFileError)


def test_many_names_for_one_chunk_are_refused(folder: Folder) -> None:
    folder.tensor("w", (1 << 16,), [((0,), torch.ones(1 << 16))])
    entry, place = folder.index.state_dict_metadata["w"], folder.index.storage_data[MetadataIndex("w", (0,))]
    for number in range(1000):
        folder.index.state_dict_metadata[f"w{number}"] = entry
        folder.index.storage_data[MetadataIndex(f"w{number}", (0,))] = place
    with limited_memory():
        refused(folder.write(), "larger than the files", CorruptFileError)


def test_chunks_that_share_bytes_are_refused(folder: Folder) -> None:
    folder.tensor("a", (2,), [((0,), torch.ones(2))])
    folder.tensor("b", (2,), [((0,), torch.ones(2))])
    first, second = folder.index.storage_data.values()
    second.offset, second.length = first.offset + 1, first.length
    refused(folder.write(), "overlap", CorruptFileError)


def test_a_chunk_of_equal_elements_is_not_a_bomb(folder: Folder) -> None:
    """A stride of zero claims any number of elements."""
    folder.tensor("w", (1 << 40,), [((0,), torch.zeros(1).expand(1 << 40))], dtype=torch.float32)
    with limited_memory():
        refused(folder.write(), "larger than the files", CorruptFileError)


def change_directory(data: bytes, change: Callable[[bytearray, int], None]) -> bytes:
    changed = bytearray(data)
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        change(changed, opened.start_dir)
    return bytes(changed)


@pytest.mark.parametrize(
    ("layout", "at", "value"), [("H", 10, 8), ("I", 24, 1 << 31), ("I", 20, 1 << 31), ("H", 28, 9999), ("I", 42, 1 << 30), ("H", 8, 1)]
)
def test_damaged_directories_of_archives_are_refused(layout: str, at: int, value: int, folder: Folder) -> None:
    folder.tensor("w", (2,), [((0,), torch.ones(2))])
    folder.data = change_directory(folder.data, lambda data, start: struct.pack_into(f"<{layout}", data, start + at, value))
    refused(folder.write(), ".", CorruptFileError)


def test_missing_and_cut_files_are_named(folder: Folder) -> None:
    folder.tensor("w", (2,), [((0,), torch.ones(2))])
    path = folder.write()
    (path / "__0_0.distcp").write_bytes(folder.data[:-10])
    assert refused(path, "the file ends at", CorruptFileError).path == str(path / "__0_0.distcp")
    (path / "__0_0.distcp").unlink()
    refused(path, "no such file", toc.CheckpointError)
    os.mkdir(path / "__0_0.distcp")
    refused(path, "not a regular file")
    if hasattr(os, "mkfifo"):
        os.rmdir(path / "__0_0.distcp")
        os.mkfifo(path / "__0_0.distcp")
        refused(path, "not a regular file")
