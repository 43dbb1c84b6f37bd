"""What a graph holds: its inputs and outputs, nodes and their attributes, gradients, the order of the module's parameters."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx.shape_inference
import torch
from google.protobuf.message import DecodeError
from torch import nn

from ..dtypes import TORCH_FROM_ONNX, short_name
from ..errors import CheckpointError, CorruptFileError, MissingDependencyError, MissingFileError, UnsupportedError

ACCUMULATION_BUFFER = "_grad.accumulation.buffer"
ACCUMULATION_OUTPUT = "_grad.accumulation.out"
LAZY_RESET = "lazy_reset_grad"
ORDER = "torch_ort_ckpt.order"
"""Key of a graph's metadata that says in which order the exported module has its parameters and buffers."""
PADDING = "padding_idx="
DETACHED = "detached"
"""Doc string of an Identity through which no gradient flows (`Tensor.detach`, `torch.no_grad`)."""
LABELS = "torch_ort_ckpt.labels"
"""Key of a graph's metadata: input -> [number of classes, the label that is left out]."""
COUNTERS = "torch_ort_ckpt.counters"
"""Key of a graph's metadata that says which integer buffers (`num_batches_tracked`) grow by how much with each training step."""

RANDOM_OPS = frozenset(
    {"Dropout", "BitmaskDropout", "BiasDropout", "BitmaskBiasDropout", "Bernoulli", "Multinomial"}
    | {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
ONNX_ERRORS = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError)
"""Exceptions that the `onnx` package raises for a bad model; they are always converted to ours."""
RECURRENT_OPS = frozenset({"LSTM", "LSTMTraining", "GRU", "GRUTraining", "RNN"})


_ORT_TYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(int16)": torch.int16,
    "tensor(int8)": torch.int8,
    "tensor(uint64)": torch.uint64,
    "tensor(uint32)": torch.uint32,
    "tensor(uint16)": torch.uint16,
    "tensor(uint8)": torch.uint8,
    "tensor(bool)": torch.bool,
}


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph; symbolic dimensions are strings, unknown ones `?`. `shape` is None where the rank is unknown."""

    name: str
    dtype: torch.dtype | None
    shape: tuple[int | str, ...] | None

    def __str__(self) -> str:
        dtype = short_name(self.dtype) if self.dtype else "sequence"
        return f"{self.name}: {dtype}{list(self.shape) if self.shape is not None else '[...]'}".replace("'", "")


def load_model(path: str | os.PathLike[str], *, weights: bool = False) -> onnx.ModelProto:
    """Parse an ONNX file; external data is read only on request."""
    try:
        model = onnx.load(os.fspath(path), load_external_data=weights)
    except FileNotFoundError as error:
        raise MissingFileError("no such file", path=path) from error
    except (DecodeError, ValueError, onnx.checker.ValidationError) as error:
        raise CorruptFileError(f"not an ONNX model ({error})", path=path) from error
    except OSError as error:
        raise CheckpointError(f"can't be read ({error.strerror})", path=path, remedy="Check the path and its permissions.") from error
    if not model.HasField("graph"):
        raise CorruptFileError("not an ONNX model (it holds no graph)", path=path)
    return model


def spec_of(value: onnx.ValueInfoProto) -> TensorSpec:
    if not value.type.HasField("tensor_type"):
        return TensorSpec(value.name, None, None)
    kind = value.type.tensor_type
    shape: tuple[int | str, ...] | None = None
    if kind.HasField("shape"):
        shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in kind.shape.dim)
    return TensorSpec(value.name, TORCH_FROM_ONNX.get(kind.elem_type), shape)


def describe_ort_file(path: str | os.PathLike[str], side: str) -> list[TensorSpec]:
    """Inputs (`side="input"`) or outputs of a model in ORT's own format, which only ORT can read."""
    session = _open_ort_file(path)
    found = session.get_inputs() if side == "input" else session.get_outputs()
    return [
        TensorSpec(value.name, _ORT_TYPES.get(value.type), tuple(size if size is not None else "?" for size in value.shape))
        for value in found
    ]


def _open_ort_file(path: str | os.PathLike[str]) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            f"only ONNX Runtime reads .ort models ({error})",
            path=path,
            remedy='pip install "torch-ort-ckpt[ort]", or use the .onnx files. `torch-ort-ckpt doctor` shows what works here.',
        ) from error
    return onnxruntime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])


def write_order(model: onnx.ModelProto, module: nn.Module) -> None:
    """Record the module's order of parameters and buffers in a graph; `OrtModule` then has the same order."""
    order: list[str] = []
    buffers: list[str] = []
    for prefix, part in module.named_modules():
        start = f"{prefix}." if prefix else ""
        own = [start + name for name, _ in part.named_buffers(recurse=False, remove_duplicate=False)]
        order += [start + name for name, _ in part.named_parameters(recurse=False, remove_duplicate=False)] + own
        buffers += own
    model.metadata_props.add(key=ORDER, value=json.dumps({"order": order, "buffers": buffers}))


def read_order(path: str | os.PathLike[str], model: onnx.ModelProto | None) -> tuple[list[str], list[str]] | None:
    """The names of the exported module's parameters and buffers in its order, and those of the buffers; None if they were not recorded.

    Without a `model` the file is one in ORT's own format.
    """
    if model is not None:
        entries = {entry.key: entry.value for entry in model.metadata_props}
    else:
        entries = _open_ort_file(path).get_modelmeta().custom_metadata_map
    if ORDER not in entries:
        return None
    try:
        content = json.loads(entries[ORDER])
        found = content["order"], content["buffers"]
    except (ValueError, LookupError, TypeError, RecursionError):
        found = None, None
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in found):
        raise CorruptFileError(
            "not two lists of names", path=path, field=ORDER, remedy="Export again, or remove this entry of the metadata."
        )
    return found


def read_labels(model: onnx.ModelProto) -> dict[str, tuple[int, int]]:
    """The inputs of a graph that are class indices: the number of classes, and the label that is left out, where the graph records them."""
    text = next((entry.value for entry in model.metadata_props if entry.key == LABELS), "{}")
    try:
        return {str(name): (int(classes), int(ignored)) for name, (classes, ignored) in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(
            f"not names with two whole numbers ({error})", field=LABELS, remedy="Export again, or remove this entry of the metadata."
        ) from error


def read_counters(path: str | os.PathLike[str], model: onnx.ModelProto | None) -> dict[str, int]:
    """The integer buffers that grow with each training step, and by how much, where the graph records them."""
    if model is not None:
        text = next((entry.value for entry in model.metadata_props if entry.key == COUNTERS), "{}")
    else:
        text = _open_ort_file(path).get_modelmeta().custom_metadata_map.get(COUNTERS, "{}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(type(steps) is int for steps in found.values()):
        raise CorruptFileError(
            "not names with whole numbers", path=path, field=COUNTERS, remedy="Export again, or remove this entry of the metadata."
        )
    return found


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {item.name: attribute_value(item) for item in node.attribute}


def attribute_value(item: onnx.AttributeProto) -> Any:
    try:
        return onnx.helper.get_attribute_value(item)
    except ValueError as error:
        raise CorruptFileError(f"an attribute that has no value ({error})", field=item.name) from error


def all_nodes(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    """Every node, those inside If / Loop bodies too."""
    for node in graph.node:
        yield node
        for body in bodies(node):
            yield from all_nodes(body)


def bodies(node: onnx.NodeProto) -> Iterable[onnx.GraphProto]:
    """The graphs inside a node: the branches of an If, the body of a Loop."""
    for item in node.attribute:
        yield from [item.g] if item.type == onnx.AttributeProto.GRAPH else item.graphs


def reads(node: onnx.NodeProto) -> Iterable[str]:
    """The values that a node reads, inside If / Loop bodies too."""
    yield from node.input
    for body in bodies(node):
        for inner in all_nodes(body):
            yield from inner.input


def standard_opset(model: onnx.ModelProto) -> int:
    """The version of the standard operators that the model uses."""
    return max((int(item.version) for item in model.opset_import if item.domain in ("", "ai.onnx")), default=1)


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def padding_row(node: onnx.NodeProto) -> int | None:
    """The row of an embedding without gradient (PyTorch's `padding_idx`), stored in the Gather's doc_string by our export."""
    text = node.doc_string.removeprefix(PADDING) if node.op_type == "Gather" and node.doc_string.startswith(PADDING) else ""
    return int(text) if text.isdecimal() else None


def gradient_names(model: onnx.ModelProto) -> dict[str, str]:
    """Parameter -> the value that is its gradient, from the nodes that add it to its accumulation buffer."""
    names = {}
    for node in model.graph.node:
        if node.op_type == "InPlaceAccumulatorV2" and node.input[0].endswith(ACCUMULATION_BUFFER):
            names[node.input[0].removesuffix(ACCUMULATION_BUFFER)] = node.input[1]
    return names


def is_random(model: onnx.ModelProto) -> bool:
    """Whether running the graph draws random numbers."""
    return any(node.op_type in RANDOM_OPS for node in all_nodes(model.graph))


def model_bytes(model: onnx.ModelProto, path: Path | None) -> bytes:
    """The bytes that a session is created from. Weights are inputs, not initializers, so even large models have small graphs."""
    try:
        return bytes(model.SerializeToString())
    except ValueError as error:
        raise UnsupportedError(f"a graph larger than 2 GiB ({error})", path=path, remedy="Keep the weights out of the graph.") from error
