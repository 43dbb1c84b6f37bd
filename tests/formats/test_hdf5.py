"""HDF5 read in place: the same tree as h5py reads, in every layout; links out of the file and endless structures are refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt.errors import CorruptFileError, UnsupportedError
from torch_ort_ckpt.formats.legacy.hdf5 import Tree, read_tree
from torch_ort_ckpt.storage.buffers import FileBuffer

from ..truth import Truth, fixtures

FILES = [place for name in fixtures("ortcp") for place in sorted(Truth(name).folder.glob("*.ortcp"))]


@pytest.mark.parametrize("place", FILES, ids=lambda place: f"{place.parent.name}-{place.stem}")
def test_every_file_of_ort_gives_the_tree_that_h5py_gives(place: Path) -> None:
    with h5py.File(place) as file:
        assert _equal(read_tree(FileBuffer(place)), file)


@pytest.mark.parametrize("count", [3, 9, 500])  # in one node, beyond a compact group, in a tree of nodes
@pytest.mark.parametrize("library", ["earliest", "v110", "latest"])
@pytest.mark.parametrize("name", ["layer.{}.weight", "слой {}"])  # other than ASCII makes h5py choose other structures
def test_every_layout_of_groups_is_read(count: int, library: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver=library) as file:
        group = file.create_group("model/full_precision")
        for index in range(count):
            group[name.format(index)] = np.full((2, index % 4), index, np.float32)
        file["text"] = "ü" * 5000
        file["flag"] = True
        file["empty"] = ""
    with h5py.File(path) as file:
        assert _equal(read_tree(FileBuffer(path)), file)


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "?"])
@pytest.mark.parametrize("library", ["earliest", "latest"])
def test_every_element_type_is_read(dtype: str, library: str, tmp_path: Path) -> None:
    values = np.arange(6).reshape(2, 3).astype(dtype)
    with h5py.File(tmp_path / "x.h5", "w", libver=library) as file:
        file["a"], file["scalar"], file["none"] = values, values[0, 1], values[:, :0]
    tree = read_tree(FileBuffer(tmp_path / "x.h5"))
    assert tree["a"].numpy().dtype == values.dtype
    assert np.array_equal(tree["a"].numpy(), values)
    assert tree["scalar"].item() == values[0, 1]
    assert tree["none"].shape == (2, 0)


def test_tensors_alias_the_mapped_file() -> None:
    place = Truth("ortcp_ort1_12_0_adam").checkpoint
    buffer = FileBuffer(place)
    start = np.frombuffer(buffer.data, np.uint8).ctypes.data
    weight = read_tree(buffer)["model"]["full_precision"]["fc1.weight"]
    assert start <= weight.data_ptr() < start + buffer.size


@pytest.mark.parametrize("library", ["earliest", "latest"])
@pytest.mark.parametrize(
    "kind", ["soft", "external", "virtual", "external storage", "chunked", "compressed", "twice", "cycle", "big-endian", "shared type"]
)
def test_what_leads_elsewhere_is_refused(kind: str, library: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.h5"
    with h5py.File(secret, "w") as file:
        file["w"] = np.ones(4, np.float32)
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver=library) as file:
        weights = file.create_group("model/full_precision")
        _add(file, weights, kind, secret)
    with pytest.raises(UnsupportedError) as caught:
        toc.load(path)
    assert caught.value.path == str(path)
    assert caught.value.field.startswith("model/full_precision/")


def _add(file: Any, group: Any, kind: str, secret: Path) -> None:
    ones = np.ones(4, np.float32)
    if kind == "soft":
        file["w"] = ones
        group["w"] = h5py.SoftLink("/w")
    elif kind == "external":
        group["w"] = h5py.ExternalLink(str(secret), "/w")
    elif kind == "virtual":
        layout = h5py.VirtualLayout(shape=(4,), dtype="f4")
        layout[:] = h5py.VirtualSource(str(secret), "w", shape=(4,))
        group.create_virtual_dataset("w", layout)
    elif kind == "external storage":
        group.create_dataset("w", (4,), "f4", external=[(str(secret), 0, 16)])
    elif kind == "chunked":
        group.create_dataset("w", (1 << 40,), "f4", chunks=(1 << 10,))  # four terabytes of unallocated data in a small file
    elif kind == "compressed":
        group.create_dataset("w", data=ones, compression="gzip")
    elif kind == "twice":
        group["v"] = ones
        group["w"] = group["v"]
    elif kind == "cycle":
        group["w"] = file["model"]
    elif kind == "big-endian":
        group["w"] = ones.astype(">f4")
    else:
        group["z.type"] = np.dtype("f4")
        group.create_dataset("w", data=ones, dtype=group["z.type"])


def test_space_that_was_never_written_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("model/full_precision/w", (1 << 40,), "f4")  # no bytes on disk at all
    with pytest.raises(toc.CheckpointError, match="w: "):
        toc.load(tmp_path / "x.h5")


def test_a_group_that_contains_itself_ends(tmp_path: Path) -> None:
    """Two symbol table entries are made to name the same object."""
    data = bytearray(Truth("ortcp_ort1_12_0_adam").checkpoint.read_bytes())
    (root,) = struct.unpack_from("<Q", data, 64)
    node = data.index(b"SNOD")
    struct.pack_into("<Q", data, node + 8 + 8, root)
    (tmp_path / "x.ortcp").write_bytes(data)
    with pytest.raises(toc.CheckpointError, match="linked twice"):
        toc.load(tmp_path / "x.ortcp")


@pytest.mark.parametrize("size", [0, 7, 8, 9, 30, 100])
def test_a_file_that_ends_early_is_refused(size: int, tmp_path: Path) -> None:
    data = Truth("ortcp_ort1_12_0_adam").checkpoint.read_bytes()
    (tmp_path / "x.ortcp").write_bytes(data[:size])
    with pytest.raises(CorruptFileError):
        toc.load(tmp_path / "x.ortcp", format="ortcp")


def _equal(tree: Tree, group: Any) -> bool:
    if tree.keys() != set(group):
        return False
    for name, value in tree.items():
        item = group[name]
        if isinstance(value, dict):
            if not _equal(value, item):
                return False
        elif isinstance(value, torch.Tensor):
            stored = item[()]
            if value.numpy().dtype != stored.dtype or tuple(value.shape) != item.shape or not np.array_equal(value.numpy(), stored):
                return False
        elif value.item() != item.asstr()[()]:
            return False
    return True
