"""ONNX graphs of training artifacts: what their inputs and outputs are, and the few changes they need before they run."""

from __future__ import annotations

import heapq
import json
import logging
import os
from collections.abc import Iterable, Mapping
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

logger = logging.getLogger(__name__)

ACCUMULATION_BUFFER = "_grad.accumulation.buffer"
ACCUMULATION_OUTPUT = "_grad.accumulation.out"
LAZY_RESET = "lazy_reset_grad"
ORDER = "torch_ort_ckpt.order"
"""Key of a graph's metadata that says in which order the exported module has its parameters and buffers."""
PADDING = "padding_idx="

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


@dataclass(frozen=True)
class BatchNorm:
    """A BatchNormalization of the training graph: the names of its result and of its running statistics."""

    output: str
    mean: str
    variance: str
    momentum: float


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
        own = [start + name for name, value in part._buffers.items() if value is not None]
        order += [start + name for name, value in part._parameters.items() if value is not None] + own
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


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {item.name: attribute_value(item) for item in node.attribute}


def attribute_value(item: onnx.AttributeProto) -> Any:
    try:
        return onnx.helper.get_attribute_value(item)
    except ValueError as error:
        raise CorruptFileError(f"an attribute that has no value ({error})", field=item.name) from error


def with_inferred_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the types and shapes of its values, as far as they can be found."""
    try:
        return onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=False, data_prop=True)
    except (*ONNX_ERRORS, ValueError) as error:
        raise UnsupportedError(
            f"its shapes can't be inferred ({str(error).strip()})",
            remedy="The graph is inconsistent: export it again, with another opset or exporter.",
        ) from error


def all_nodes(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    """Every node, those inside If / Loop bodies too."""
    for node in graph.node:
        yield node
        for item in node.attribute:
            for body in [item.g] if item.type == onnx.AttributeProto.GRAPH else item.graphs:
                yield from all_nodes(body)


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


def direct_gradients(model: onnx.ModelProto) -> onnx.ModelProto:
    """The training graph with the gradients themselves as outputs, in place of nodes that add them to buffers.

    PyTorch accumulates gradients, and writing a gradient directly to its destination saves one pass over memory.
    """
    gradients = gradient_names(model)
    shapes = {value.name: value for value in model.graph.input}
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    kept = [node for node in graph.node if node.op_type != "InPlaceAccumulatorV2"]
    outputs = [value for value in graph.output if not value.name.endswith(ACCUMULATION_OUTPUT)]
    inputs = [value for value in graph.input if not value.name.endswith(ACCUMULATION_BUFFER) and value.name != LAZY_RESET]
    produced = {name for node in kept for name in node.output}
    seen = {value.name for value in outputs}
    for parameter, name in gradients.items():
        if name not in produced or name in seen:  # a constant, or one value that is the gradient of two parameters
            name, source = f"{parameter}{ACCUMULATION_OUTPUT}.value", name
            kept.append(onnx.helper.make_node("Identity", [source], [name]))
        seen.add(name)
        output = onnx.ValueInfoProto()
        output.CopyFrom(shapes[parameter + ACCUMULATION_BUFFER])
        output.name = name
        outputs.append(output)
    for field, values in ((graph.node, kept), (graph.output, outputs), (graph.input, inputs)):
        del field[:]
        field.extend(values)
    return changed


def direct_gradient_names(model: onnx.ModelProto) -> dict[str, str]:
    """Parameter -> output of the graph that `direct_gradients` makes of this model."""
    produced = {name for node in model.graph.node if node.op_type != "InPlaceAccumulatorV2" for name in node.output}
    seen = {value.name for value in model.graph.output}
    names = {}
    for parameter, name in gradient_names(model).items():
        names[parameter] = f"{parameter}{ACCUMULATION_OUTPUT}.value" if name not in produced or name in seen else name
        seen.add(names[parameter])
    return names


def batch_norms(model: onnx.ModelProto) -> list[BatchNorm]:
    """The BatchNorms whose running statistics the training graph updates, in its order. A layer used twice is there twice."""
    found = []
    roots = {value.name: value.name for value in model.graph.input}
    for node in model.graph.node:
        if node.op_type == "Identity" and node.input[0] in roots:  # how the second use of a layer comes by its statistics
            roots[node.output[0]] = roots[node.input[0]]
        if _trains_statistics(node) and node.input[3] in roots and node.input[4] in roots:
            mean, variance = roots[node.input[3]], roots[node.input[4]]
            roots |= dict(zip(node.output[1:3], (mean, variance), strict=False))  # the next use of the layer continues from there
            found.append(BatchNorm(node.output[0], mean, variance, float(attributes(node).get("momentum", 0.9))))
    return found


def shares_statistics(model: onnx.ModelProto) -> bool:
    """Whether a BatchNorm is used more than once."""
    means = [norm.mean for norm in batch_norms(model)]
    return len(set(means)) < len(means)


def chain_statistics(model: onnx.ModelProto, evaluation: onnx.ModelProto | None) -> None:
    """Let every further use of a BatchNorm continue from the running statistics of the previous use (in place).

    A training graph does not show which use that is: ORT's gradient builder reorders its nodes. It keeps the eval graph
    in the order in which the module called its layers.
    """
    uses: dict[str, list[BatchNorm]] = {}
    for norm in batch_norms(model):
        uses.setdefault(norm.mean, []).append(norm)
    shared = [norms for norms in uses.values() if len(norms) > 1]
    if not shared:
        return
    order = [output for node in (evaluation.graph.node if evaluation is not None else ()) for output in node.output]
    called = {name: place for place, name in enumerate(order)}
    known = all(norm.output in called for norms in shared for norm in norms)
    if not known:
        names = ", ".join(norms[0].mean for norms in shared)
        logger.warning("%s: used more than once, in an order that only an eval graph shows; the order of the node names is used", names)
    for norms in shared:
        _link(model, sorted(norms, key=lambda norm: [("", called[norm.output])] if known else _by_number(norm.output)))
    ordered = _topological(model.graph)
    if len(ordered) < len(model.graph.node):  # the names are misleading: one use computes what an earlier one by name reads
        for norms in shared:
            _link(model, norms)
        ordered = _topological(model.graph)
    del model.graph.node[:]
    model.graph.node.extend(ordered)


def _link(model: onnx.ModelProto, norms: list[BatchNorm]) -> None:
    """Let the uses of one BatchNorm update its statistics in this order."""
    nodes = {node.output[0]: node for node in model.graph.node if node.output}
    latest = [norms[0].mean, norms[0].variance]
    for norm in norms:
        node = nodes[norm.output]
        node.input[3], node.input[4] = latest
        while len(node.output) < 3:
            node.output.append("")
        for place in (1, 2):
            node.output[place] = node.output[place] or f"{norm.output}.statistics{place}"
        latest = list(node.output[1:3])


def _by_number(name: str) -> list[tuple[str, int]]:
    """Exporters call the uses of `/block/bn` `/block/bn`, `/block/bn_1`, ..., `/block/bn_10`, or number the values."""
    parts = (part.rpartition("_") for part in name.split("/"))
    return [(stem, int(end)) if mark and end.isdigit() else (stem + mark + end, -1) for stem, mark, end in parts]


def _topological(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes with each after those it reads from, otherwise in their order. Nodes in a cycle are dropped."""
    producers = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    waiting = [0] * len(graph.node)
    readers: list[list[int]] = [[] for _ in graph.node]
    for place, node in enumerate(graph.node):
        for source in {producers[name] for name in reads(node) if name in producers}:
            waiting[place] += 1
            readers[source].append(place)
    ready = [place for place, count in enumerate(waiting) if not count]
    ordered = []
    while ready:
        place = heapq.heappop(ready)
        ordered.append(graph.node[place])
        for reader in readers[place]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    return ordered


def reads(node: onnx.NodeProto) -> Iterable[str]:
    """What a node reads, the bodies of If and Loop too."""
    yield from node.input
    for item in node.attribute:
        for body in [item.g] if item.type == onnx.AttributeProto.GRAPH else item.graphs:
            for inner in all_nodes(body):
                yield from inner.input


def _trains_statistics(node: onnx.NodeProto) -> bool:
    return node.op_type == "BatchNormInternal" or (node.op_type == "BatchNormalization" and bool(attributes(node).get("training_mode")))


def unbias_statistics(model: onnx.ModelProto) -> dict[str, str]:
    """Let the graph compute BatchNorm's running variance as PyTorch does (in place); ORT's CPU kernel uses the biased one.

    With the momentum m and n values per channel, `m*old + (new - m*old) * n/(n-1)`. The kernel overwrites its input, so it gets a copy.
    Returns the outputs that hold the result, by the variances' names.
    """
    graph = model.graph
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    norms = {norm.output: norm for norm in batch_norms(model)}
    latest: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        norm = norms.get(node.output[0])
        if norm is None or len(node.output) < 3 or not node.output[2]:
            nodes.append(node)
            continue
        source, variance = node.input[0], norm.variance
        old = latest.get(variance, variance)
        prefix = f"{node.output[0]}.unbiased"
        momentum, channels, one = f"{prefix}.momentum", f"{prefix}.channels", f"{prefix}.one"
        (size,) = (dim.dim_value for value in graph.input if value.name == variance for dim in value.type.tensor_type.shape.dim)
        kind, double = types[variance], onnx.TensorProto.DOUBLE
        graph.initializer.extend(
            [
                onnx.helper.make_tensor(momentum, kind, [], [norm.momentum]),
                onnx.helper.make_tensor(channels, double, [], [float(size)]),
                onnx.helper.make_tensor(one, double, [], [1.0]),
            ]
        )

        def add(kind: str, *inputs: str, prefix: str = prefix, **settings: Any) -> str:
            output = f"{prefix}.{len(nodes)}"
            nodes.append(onnx.helper.make_node(kind, inputs, [output], **settings))
            return output

        node.input[4] = add("Abs", old)  # a copy that no optimization removes; a variance is never negative
        nodes.append(node)
        count = add("Div", add("Cast", add("Size", source), to=double), channels)
        factor = add("Cast", add("Div", count, add("Max", add("Sub", count, one), one)), to=kind)
        kept = add("Mul", old, momentum)
        latest[variance] = add("Add", kept, add("Mul", add("Sub", node.output[2], kept), factor))
    del graph.node[:]
    graph.node.extend(nodes)
    graph.output.extend(onnx.helper.make_tensor_value_info(output, types[name], None) for name, output in latest.items())
    return latest


def is_random(model: onnx.ModelProto) -> bool:
    """Whether running the graph draws random numbers."""
    return any(node.op_type in RANDOM_OPS for node in all_nodes(model.graph))


def fix_dimensions(model: onnx.ModelProto, sizes: Mapping[str, int]) -> onnx.ModelProto:
    """The graph with symbolic dimensions replaced by sizes, in its inner values too: AveragePoolGrad takes its shape from there."""
    if not sizes:
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for value in [*changed.graph.input, *changed.graph.output, *changed.graph.value_info]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    return changed


def model_bytes(model: onnx.ModelProto, path: Path | None) -> bytes:
    """The bytes that a session is created from. Weights are inputs, not initializers, so even large models have small graphs."""
    try:
        return bytes(model.SerializeToString())
    except ValueError as error:
        raise UnsupportedError(f"a graph larger than 2 GiB ({error})", path=path, remedy="Keep the weights out of the graph.") from error
