"""ONNX graphs of training artifacts: what their inputs and outputs are, and the few changes they need before they run."""

from __future__ import annotations

import json
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

from .dtypes import TORCH_FROM_ONNX, short_name
from .errors import CheckpointError, CorruptFileError, MissingDependencyError, MissingFileError, UnsupportedError

ACCUMULATION_BUFFER = "_grad.accumulation.buffer"
ACCUMULATION_OUTPUT = "_grad.accumulation.out"
LAZY_RESET = "lazy_reset_grad"
ORDER = "torch_ort_ckpt.order"
"""Key of a graph's metadata that says in which order the exported module has its parameters and buffers."""

RANDOM_OPS = frozenset(
    {"Dropout", "BitmaskDropout", "BiasDropout", "BitmaskBiasDropout", "Bernoulli", "Multinomial"}
    | {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
ONNX_ERRORS = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError)
"""What the `onnx` package raises about a model; nobody outside sees them."""
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
    """Parse an ONNX file; external data is read only where asked for."""
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
    """Note in a graph how the module orders its parameters and buffers; `OrtModule` then has the same order."""
    order: list[str] = []
    buffers: list[str] = []
    for prefix, part in module.named_modules():
        start = f"{prefix}." if prefix else ""
        own = [start + name for name, value in part._buffers.items() if value is not None]
        order += [start + name for name, value in part._parameters.items() if value is not None] + own
        buffers += own
    model.metadata_props.add(key=ORDER, value=json.dumps({"order": order, "buffers": buffers}))


def read_order(path: str | os.PathLike[str], model: onnx.ModelProto | None) -> tuple[list[str], list[str]] | None:
    """The names of the exported module's parameters and buffers in its order, and those of the buffers; None where nobody noted them.

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
            "not the lists of names it should be", path=path, field=ORDER, remedy="Export again, or remove this entry of the metadata."
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
            remedy="The graph contradicts itself: export it anew, with another opset or exporter.",
        ) from error


def all_nodes(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    """Every node, those inside If / Loop bodies too."""
    for node in graph.node:
        yield node
        for item in node.attribute:
            for body in [item.g] if item.type == onnx.AttributeProto.GRAPH else item.graphs:
                yield from all_nodes(body)


def gradient_names(model: onnx.ModelProto) -> dict[str, str]:
    """Parameter -> the value that is its gradient, from the nodes that add it to its accumulation buffer."""
    names = {}
    for node in model.graph.node:
        if node.op_type == "InPlaceAccumulatorV2" and node.input[0].endswith(ACCUMULATION_BUFFER):
            names[node.input[0].removesuffix(ACCUMULATION_BUFFER)] = node.input[1]
    return names


def direct_gradients(model: onnx.ModelProto) -> onnx.ModelProto:
    """The training graph with the gradients themselves as outputs, in place of nodes that add them to buffers.

    Adding is PyTorch's business, and a gradient written straight into its place costs one pass over memory less.
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
            found.append(BatchNorm(node.output[0], mean, variance, float(attributes(node).get("momentum", 0.9))))
    return found


def _trains_statistics(node: onnx.NodeProto) -> bool:
    return node.op_type == "BatchNormInternal" or (node.op_type == "BatchNormalization" and bool(attributes(node).get("training_mode")))


def unbias_statistics(model: onnx.ModelProto) -> dict[str, str]:
    """Let the graph compute BatchNorm's running variance as PyTorch keeps it (in place); ORT's CPU kernel keeps the biased one.

    With the momentum m and n values per channel, `m*old + (new - m*old) * n/(n-1)`. The kernel writes over its input, so it gets a copy.
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


def refuse_crashes(model: onnx.ModelProto, fixed: Iterable[str], path: str | os.PathLike[str] | None = None) -> None:
    """Refuse training graphs that take the whole process down in ORT 1.19.2, instead of running them.

    `fixed` names the symbolic dimensions that the caller has given a size.
    """
    fixed = set(fixed)
    inputs = {value.name: spec_of(value) for value in model.graph.input}
    shapes = inputs | {value.name: spec_of(value) for value in model.graph.value_info}
    gradients = gradient_names(model)
    free = any(isinstance(size, str) and size not in fixed for spec in inputs.values() for size in (spec.shape or ()))
    for node in all_nodes(model.graph):
        if node.op_type == "AveragePoolGrad" or (node.op_type in ("AveragePool", "MaxPool") and gradients):
            source = shapes.get(node.input[0])
            shape = source.shape if source is not None else None
            maximum = node.op_type == "MaxPool"  # its gradient bears a dynamic batch
            dynamic = shape is None or any(isinstance(size, str) and size not in fixed for size in shape[2 if maximum else 0 :])
            if dynamic and free:
                how = "segmentation fault) when height or width are" if maximum else "division by zero, SIGFPE) when the batch is"
                raise UnsupportedError(
                    f"its gradient crashes ONNX Runtime ({how} dynamic",
                    path=path,
                    field=f"{node.op_type} {node.name}",
                    remedy='Fix every symbolic dimension: OrtModule(..., dimensions={"batch": 8}); or use engine="torch".',
                )
        if node.op_type in RECURRENT_OPS and gradients:
            weights = [name for name in node.input[1:3] if name]
            frozen = [name for name in weights if _comes_from_frozen(model, name, gradients)]
            if frozen:
                raise UnsupportedError(
                    f"ONNX Runtime crashes (segmentation fault) on a recurrent layer whose weights are frozen: {', '.join(frozen)}",
                    path=path,
                    field=f"{node.op_type} {node.name}",
                    remedy='Export with these weights trainable and leave them out of the optimizer; or use engine="torch".',
                )


def _comes_from_frozen(model: onnx.ModelProto, name: str, gradients: dict[str, str]) -> bool:
    """Whether a value is computed from constants and frozen parameters only."""
    producers = {output: node for node in model.graph.node for output in node.output}
    waiting, seen = [name], set()
    while waiting:
        current = waiting.pop()
        if current in gradients:
            return False
        if current in producers and current not in seen:
            seen.add(current)
            waiting.extend(producers[current].input)
    return True


def model_bytes(model: onnx.ModelProto, path: Path | None) -> bytes:
    """What a session is made from. Weights are inputs, not initializers, so even large models have small graphs."""
    try:
        return bytes(model.SerializeToString())
    except ValueError as error:
        raise UnsupportedError(f"a graph beyond 2 GiB ({error})", path=path, remedy="Keep the weights out of the graph.") from error
