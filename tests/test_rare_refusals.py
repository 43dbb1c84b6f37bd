"""Refusals and defaults that only unusual files and calls meet: each with the file, the field and the remedy it must name."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import onnx.reference
import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt.checkpoint.backing import bytes_on_disk
from torch_ort_ckpt.engines import EngineOptions, why_not_ort
from torch_ort_ckpt.errors import CorruptFileError, UnsupportedError
from torch_ort_ckpt.formats.legacy.hdf5 import read_tree
from torch_ort_ckpt.formats.torch.objects import storage_identity
from torch_ort_ckpt.formats.torch.pickled import Name, PickleError, Reference
from torch_ort_ckpt.graphs.translation.ops_rnn import _function
from torch_ort_ckpt.graphs.translation.ops_shape import gather_nd
from torch_ort_ckpt.storage.buffers import FileBuffer

FLOATS = Name("torch.FloatStorage")


def test_an_error_comes_back_whole_from_another_process() -> None:
    error = pickle.loads(pickle.dumps(UnsupportedError("no", path="a", field="b", remedy="c")))
    assert type(error) is UnsupportedError
    assert (error.message, error.path, error.field, error.remedy) == ("no", "a", "b", "c")


def test_a_nominal_state_says_so() -> None:
    assert "nominal" in repr(toc.CheckpointState({"w": torch.empty(2, device="meta")}, nominal=True)).strip("()").split(", ")
    assert "nominal" not in repr(toc.CheckpointState({"w": torch.ones(2)}))


def test_the_size_on_disk_is_that_of_the_files(tmp_path: Path) -> None:
    state = toc.CheckpointState({"w": torch.ones(5)})
    toc.save(state, tmp_path / "c", external_data=True)
    assert bytes_on_disk(toc.load(tmp_path / "c")) == sum(place.stat().st_size for place in tmp_path.iterdir())
    assert bytes_on_disk(state) is None


def test_a_dataset_without_a_shape_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w", libver="earliest") as file:
        file["none"] = h5py.Empty("f4")
    with pytest.raises(CorruptFileError, match=r"x\.h5: /?none: not a valid shape"):
        read_tree(FileBuffer(tmp_path / "x.h5"))


def test_compressed_data_is_refused_with_the_command_that_rewrites_it(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("w", data=np.zeros(100), compression="gzip")
    with pytest.raises(UnsupportedError, match="h5repack") as caught:
        read_tree(FileBuffer(tmp_path / "x.h5"))
    assert caught.value.path == str(tmp_path / "x.h5")


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_moment_of_strings_is_refused_by_name(format: str, tmp_path: Path) -> None:
    group = toc.OptimizerGroup(1, states={"w": {"m": np.array(["a", "b"], dtype=object)}})
    state = toc.CheckpointState({"w": torch.ones(2)}, optimizer={"g": group})
    with pytest.raises(UnsupportedError, match="no string tensors among moments") as caught:
        toc.save(state, tmp_path / "c", format=format)
    assert caught.value.field == "optimizer/g/w/m"


@pytest.mark.parametrize(
    "identity",
    [
        None,
        ["storage", FLOATS, "0", "cpu", 4],
        ("storage", FLOATS, "0", "cpu"),
        ("storage", FLOATS, "0", "cpu", 4, None, None),
        ("module", FLOATS, "0", "cpu", 4),
        ("storage", "FloatStorage", "0", "cpu", 4),
        ("storage", FLOATS, 0, "cpu", 4),
        ("storage", FLOATS, "0", "cpu", True),
        ("storage", FLOATS, "0", "cpu", -1),
        ("storage", FLOATS, "0", "cpu", 1 << 60),
        ("storage", FLOATS, "0", "cpu", 4, ("view",)),
    ],
)
def test_a_storage_in_another_form_is_refused(identity: Any) -> None:
    with pytest.raises(PickleError, match=r"form that torch\.save does not write"):
        storage_identity(identity if identity is None else Reference(identity))
    assert storage_identity(Reference(("storage", FLOATS, "0", "cpu", 4))) == ("0", torch.float32, 16)


def test_a_file_of_a_big_endian_machine_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as source, zipfile.ZipFile(tmp_path / "b.pt", "w") as target:
        for name in source.namelist():
            target.writestr(name, b"big" if name.endswith("byteorder") else source.read(name))
    with pytest.raises(UnsupportedError, match=r"b\.pt: written on a big-endian machine\. Save it again"):
        toc.load(tmp_path / "b.pt")


def test_external_data_starts_at_0_unless_the_model_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    graph = onnx.helper.make_graph([], "g", [], [], [tensor])
    (tmp_path / "m.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    assert toc.load(tmp_path / "m.onnx")["w"].tolist() == [0, 1, 2, 3]


def test_a_foreign_safetensors_file_has_nothing_to_repair(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    (tmp_path / "notes.None").write_text("mine")
    assert toc.verify(tmp_path / "m.safetensors", repair=True).repaired is False
    assert (tmp_path / "notes.None").read_text() == "mine"


@pytest.mark.ort
@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_onnx_runtime_is_for_the_cpu_and_cuda(device: str) -> None:
    assert why_not_ort(EngineOptions()) is None
    assert why_not_ort(EngineOptions(torch.device(device))) == f"onnxruntime does not run on {device} here"


def test_an_unknown_format_of_a_lightning_checkpoint_is_refused() -> None:
    pytest.importorskip("lightning")
    from torch_ort_ckpt.lightning import OrtCheckpoint

    with pytest.raises(toc.CheckpointError, match="'zip' is not one of") as caught:
        OrtCheckpoint("somewhere", format="zip")
    assert caught.value.field == "format"


# ONNX's operators LSTM, GRU and RNN name these; the defaults are those of ONNX Runtime
ACTIVATIONS = {
    "Relu": [0.0, 2.0],
    "Tanh": [-0.76159, 0.96403],
    "Sigmoid": [0.26894, 0.88080],
    "Softsign": [-0.5, 0.66667],
    "Softplus": [0.31326, 2.12693],
    "Affine": [-1.0, 2.0],
    "LeakyRelu": [-0.01, 2.0],
    "ThresholdedRelu": [0.0, 2.0],
    "ScaledTanh": [-0.76159, 0.96403],
    "HardSigmoid": [0.3, 0.9],
    "Elu": [-0.63212, 2.0],
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_recurrent_layers_without_their_parameters(name: str) -> None:
    torch.testing.assert_close(_function(name, None, None)(torch.tensor([-1.0, 2.0])), torch.tensor(ACTIVATIONS[name]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch_dims", [0, 1, 2])
def test_gather_nd_is_that_of_onnx(batch_dims: int) -> None:
    x = torch.arange(48.0).reshape(2, 3, 2, 4)
    indices = torch.tensor([0, 1, -1, 1, 0, -2]).reshape(2, 3, 1)[: 2 if batch_dims else 1, : 3 if batch_dims == 2 else 2]
    node = onnx.helper.make_node("GatherND", ["x", "i"], ["y"], batch_dims=batch_dims)
    inputs = [onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in (("x", 1), ("i", 7))]
    graph = onnx.helper.make_graph([node], "g", inputs, [onnx.helper.make_tensor_value_info("y", 1, None)])
    reference = onnx.reference.ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)]))
    places = indices.numpy().copy()
    (expected,) = reference.run(None, {"x": x.numpy(), "i": np.where(places < 0, places + x.shape[batch_dims], places)})
    assert gather_nd(x, indices, batch_dims=batch_dims).tolist() == expected.tolist()
