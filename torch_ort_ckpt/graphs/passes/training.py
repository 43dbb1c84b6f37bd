"""Rewrites of what ORT 1.19.2 computes wrongly in training graphs into nodes that it computes correctly. `limits.py` refuses the rest.

- `ConvGrad` of one- and three-dimensional convolutions in groups: for every group the kernel clears memory for all of them, and so writes
  zeros past the end of the result. (Whether that overwrites another gradient, the loss or nothing depends on the memory plan.)
- `ConvGrad` and `AveragePoolGrad` ignore `auto_pad`.
- `AveragePoolGrad` takes its shape from the graph, the batch too, which it needs fixed; the three-dimensional one does not sum
  windows that overlap, and mixes up its axes.
- The gradient of `Where` has the shape of the result: for a broadcast operand it is not summed.
- The gradient of `Split` is the joined gradients of those parts that have one: too short when a part is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..description import ACCUMULATION_BUFFER, attributes, spec_of, with_inferred_shapes

Shape = tuple[int | None, ...]
"""None for a dimension that is not fixed."""


def repair_training(model: onnx.ModelProto) -> list[str]:
    """Rewrite (in place) what is computed wrongly; returns what was done, for the log."""
    repairs: Iterable[tuple[str, Callable[[Rewriter, onnx.NodeProto], list[onnx.NodeProto] | None]]] = (
        ("rewrote the gradients of convolutions", _convolution_gradient),
        ("rewrote the gradients of average pooling as transposed convolutions", _pool_gradient),
        ("completed the gradients of Split", _split_gradient),
        ("summed the gradients of operands that Where broadcasts", _where_gradient),
    )
    _give_buffers_the_shape_of_their_parameters(model)
    _find_shapes_of_pools(model)
    rewriter = Rewriter(model)
    counts = dict.fromkeys((text for text, _ in repairs), 0)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        for text, repair in repairs:
            changed = repair(rewriter, node)
            if changed is not None:
                counts[text] += 1
                nodes.extend(changed)
                break
        else:
            nodes.append(node)
    done = [f"{text} ({count})" for text, count in counts.items() if count]
    if done:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        model.graph.initializer.extend(rewriter.constants)
        kept = [value for value in model.graph.value_info if value.name not in rewriter.reshaped]
        del model.graph.value_info[:]
        model.graph.value_info.extend(kept)
    return done


def _give_buffers_the_shape_of_their_parameters(model: onnx.ModelProto) -> None:
    """ORT gives them the shape that it infers for the gradient: a wrong one where the gradient was wrong."""
    inputs = {value.name: value.type for value in model.graph.input}
    for value in model.graph.input:
        parameter = value.name.removesuffix(ACCUMULATION_BUFFER)
        if parameter != value.name and parameter in inputs:
            value.type.tensor_type.shape.CopyFrom(inputs[parameter].tensor_type.shape)


def _find_shapes_of_pools(model: onnx.ModelProto) -> None:
    """Where the gradients of pools have no fixed shape in the graph, which is where their kernels look, infer it from the inputs."""
    known = shapes(model)
    forward = {f"{node.output[0]}_grad": node for node in model.graph.node if node.op_type in ("AveragePool", "MaxPool")}
    pools = {
        node.output[0]: forward[node.input[0]].input[0]
        for node in model.graph.node
        if node.op_type in ("AveragePoolGrad", "MaxPoolGrad") and node.input[0] in forward
    }
    if all(fixed(known.get(name, (None, None))[1:]) for name in pools):
        return
    inferred = infer_forward(model)
    found = {name: inferred[source] for name, source in pools.items() if source in inferred}
    kept = [value for value in model.graph.value_info if value.name not in found]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    for name, value in found.items():
        model.graph.value_info.add().CopyFrom(value)
        model.graph.value_info[-1].name = name


def infer_forward(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """What shape inference finds for the values of a training graph. To `onnx` ORT's own operators are unknown; those that keep the shape
    of their input pass it on here."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.value_info[:]
    for node in copy.graph.node:
        if node.domain and node.op_type in _SAME_SHAPE:
            node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output[:1]))
        elif node.op_type == "ConcatTraining":
            node.CopyFrom(helper.make_node("Concat", node.input, node.output[:1], axis=attributes(node)["axis"]))
    graph = with_inferred_shapes(copy).graph
    return {value.name: value for value in [*graph.value_info, *graph.input]}


_SAME_SHAPE = {"BatchNormInternal", "Gelu", "FastGelu", "QuickGelu", "BiasGelu", "BiasDropout", "BitmaskDropout", "BiasSoftmax"}


@dataclass
class Rewriter:
    """The facts about a graph that the rewrites use, and the constants they add to it."""

    model: onnx.ModelProto
    constants: list[onnx.TensorProto] = field(default_factory=list)
    reshaped: set[str] = field(default_factory=set)
    """Values that have another shape now than the graph says."""

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.opset = max((item.version for item in self.model.opset_import if item.domain in ("", "ai.onnx")), default=1)
        self.shapes = shapes(self.model)
        self.dimensions = {value.name: spec_of(value).shape for value in [*graph.value_info, *graph.output, *graph.input]}
        self.dimensions = {name: shape for name, shape in self.dimensions.items() if shape is not None and "?" not in shape}
        self.types = {value.name: value.type.tensor_type.elem_type for value in [*graph.value_info, *graph.input]}
        self.choices = {(node.input[0], f"{node.output[0]}_grad"): node for node in graph.node if node.op_type == "Where"}
        self.parts = {f"{part}_grad": node for node in graph.node if node.op_type == "Split" for part in node.output if part}

    def same_shape(self, one: str, other: str) -> bool:
        """Whether both are known to have the same; symbolic dimensions are compared by their names."""
        return one in self.dimensions and self.dimensions[one] == self.dimensions.get(other)

    def constant(self, name: str, value: Any) -> str:
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def reshape(self, source: str, shape: Sequence[int], result: str) -> onnx.NodeProto:
        return helper.make_node("Reshape", [source, self.constant(f"{result}.shape", np.array(shape, np.int64))], [result])

    def split(self, source: str, axis: int, size: int, results: Sequence[str]) -> onnx.NodeProto:
        """Into parts of one size."""
        sizes = [size] * len(results)
        if self.opset < 13:
            return helper.make_node("Split", [source], results, axis=axis, split=sizes)
        return helper.make_node("Split", [source, self.constant(f"{results[0]}.sizes", np.array(sizes, np.int64))], results, axis=axis)


def shapes(model: onnx.ModelProto) -> dict[str, Shape]:
    """Of every value whose rank is known."""
    graph = model.graph
    found: dict[str, Shape] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in [*graph.value_info, *graph.output, *graph.input]:
        if value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            found[value.name] = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in dims)
    return found


def automatic_pads(size: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], kind: str) -> list[int]:
    """The padding that `auto_pad` means: the amounts before each axis, then those after."""
    before, after = [], []
    for length, window, stride, dilation in zip(size, kernel, strides, dilations, strict=True):
        total = max((-(-length // stride) - 1) * stride + (window - 1) * dilation + 1 - length, 0) if kind.startswith("SAME") else 0
        small, large = total // 2, total - total // 2
        before.append(large if kind == "SAME_LOWER" else small)
        after.append(small if kind == "SAME_LOWER" else large)
    return before + after


def fixed(shape: Shape | None) -> tuple[int, ...] | None:
    """The sizes, if all are known."""
    sizes = tuple(size for size in shape or () if size is not None)
    return sizes if shape is not None and len(sizes) == len(shape) else None


def _convolution_gradient(rewriter: Rewriter, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    weight = fixed(rewriter.shapes.get(node.input[2])) if node.op_type == "ConvGrad" else None
    if weight is None:
        return None
    rank = len(weight) - 2
    settings: dict[str, Any] = {"strides": [1] * rank, "dilations": [1] * rank, "group": 1} | attributes(node)
    kind = settings.pop("auto_pad", b"NOTSET").decode()
    size = fixed((rewriter.shapes.get(node.input[1]) or (None, None, None))[2:])
    padded = kind.startswith("SAME") and size is not None
    if size is not None and padded:
        settings["pads"] = automatic_pads(size, weight[2:], settings["strides"], settings["dilations"], kind)
    settings["pads"] = settings.get("pads") or [0] * (2 * rank)
    settings["kernel_shape"] = list(weight[2:])
    if kind.startswith("SAME") and not padded:
        return None
    if settings["group"] > 1 and rank == 1:
        return _as_two_dimensional(rewriter, node, settings)
    if settings["group"] > 1 and rank != 2:
        return _group_by_group(rewriter, node, settings, weight)
    return [helper.make_node("ConvGrad", node.input, node.output, node.name, domain=node.domain, **settings)] if padded else None


def _as_two_dimensional(rewriter: Rewriter, node: onnx.NodeProto, settings: dict[str, Any]) -> list[onnx.NodeProto]:
    prefix = f"{node.name or next(filter(None, node.output))}.2d"
    nodes, inputs, outputs, behind = [], [], [], []
    for place, name in enumerate(node.input):
        inputs.append(f"{prefix}.input{place}")
        nodes.append(rewriter.reshape(name, [0, 0, 1, -1], inputs[-1]))
    for place, name in enumerate(node.output):
        if place == 2 or not name:  # a bias has no such axis
            outputs.append(name)
            continue
        outputs.append(f"{prefix}.output{place}")
        behind.append(helper.make_node("Reshape", [outputs[-1], rewriter.constant(f"{outputs[-1]}.shape", np.array([0, 0, -1]))], [name]))
    before, after = settings["pads"]
    changed = settings | {"pads": [0, before, 0, after]}
    changed |= {key: [1, *settings[key]] for key in ("kernel_shape", "strides", "dilations")}
    return [*nodes, helper.make_node("ConvGrad", inputs, outputs, node.name, domain=node.domain, **changed), *behind]


def _group_by_group(rewriter: Rewriter, node: onnx.NodeProto, settings: dict[str, Any], weight: tuple[int, ...]) -> list[onnx.NodeProto]:
    prefix = f"{node.name or next(filter(None, node.output))}.group"
    groups = range(settings["group"])
    count = weight[0] // len(groups)
    nodes = [
        rewriter.split(source, axis, size, [f"{prefix}{group}.input{place}" for group in groups])
        for place, (source, axis, size) in enumerate(zip(node.input, (1, 1, 0), (count, weight[1], count), strict=True))
    ]
    for group in groups:
        inputs = [f"{prefix}{group}.input{place}" for place in range(3)]
        outputs = [f"{prefix}{group}.output{place}" if name else "" for place, name in enumerate(node.output)]
        nodes.append(helper.make_node("ConvGrad", inputs, outputs, f"{prefix}{group}", domain=node.domain, **(settings | {"group": 1})))
    for place, (name, axis) in enumerate(zip(node.output, (1, 0, 0), strict=False)):
        if name:
            nodes.append(helper.make_node("Concat", [f"{prefix}{group}.output{place}" for group in groups], [name], axis=axis))
    return nodes


def _pool_gradient(rewriter: Rewriter, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """As a transposed convolution of each channel with ones, the gradient having been divided by the size of each window."""
    shape = rewriter.shapes.get(node.output[0]) if node.op_type == "AveragePoolGrad" else None
    known = fixed(shape[1:]) if shape else None
    if shape is None or known is None:
        return None
    settings = attributes(node)
    kernel, rank = list(settings["kernel_shape"]), len(known) - 1
    strides, dilations = settings.get("strides") or [1] * rank, settings.get("dilations") or [1] * rank
    kind = settings.get("auto_pad", b"NOTSET").decode()
    if shape[0] is not None and rank < 3 and kind == "NOTSET" and set(dilations) == {1}:
        return None  # the kernel is right
    channels, *size = known
    pads = settings.get("pads") or [0] * (2 * rank)
    if kind != "NOTSET":
        pads = automatic_pads(size, kernel, strides, dilations, kind)
    counts, trim, extra = np.ones([1, 1]), [], []
    for axis in range(rank):
        window = (kernel[axis] - 1) * dilations[axis] + 1
        room = size[axis] + pads[axis] + pads[rank + axis] - window
        windows = (-(-room // strides[axis]) if settings.get("ceil_mode") else room // strides[axis]) + 1
        starts = np.arange(windows)[:, None] * strides[axis] - pads[axis] + np.arange(kernel[axis]) * dilations[axis]
        inside = ((starts >= 0) & (starts < size[axis])).sum(1)
        counts = counts[..., None] * (np.full(windows, kernel[axis]) if settings.get("count_include_pad") else inside)
        beyond = (windows - 1) * strides[axis] + window - pads[axis] - size[axis]
        trim.append(max(beyond, 0))
        extra.append(max(-beyond, 0))
    prefix = f"{node.name or node.output[0]}.windows"
    scaled = f"{prefix}.scaled"
    factors = rewriter.constant(f"{prefix}.factors", (1 / counts).astype(np.float32))
    ones = rewriter.constant(f"{prefix}.ones", np.ones([channels, 1, *kernel], np.float32))
    transposed: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "group": channels}
    return [
        helper.make_node("Mul", [node.input[0], factors], [scaled]),
        helper.make_node(
            "ConvTranspose", [scaled, ones], [node.output[0]], node.name, pads=[*pads[:rank], *trim], output_padding=extra, **transposed
        ),
    ]


def _split_gradient(rewriter: Rewriter, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    split = rewriter.parts.get(node.input[0]) if node.op_type == "Concat" and node.input else None
    if split is None or len(node.input) == len(split.output):
        return None
    expected = [f"{part}_grad" for part in split.output]
    if [name for name in expected if name in set(node.input)] != list(node.input):
        return None
    if attributes(node).get("axis") != attributes(split).get("axis", 0):
        return None
    kind = rewriter.types.get(split.input[0]) or onnx.TensorProto.FLOAT
    zero = helper.make_attribute("value", helper.make_tensor("zero", kind, [1], [0]))
    nodes, inputs = [], []
    for place, name in enumerate(expected):
        if name not in node.input:
            part = split.output[place] or f"{node.output[0]}.part{place}"
            split.output[place] = part
            name = f"{node.output[0]}.zeros{place}"
            nodes.append(helper.make_node("Shape", [part], [f"{name}.shape"]))
            nodes.append(helper.make_node("ConstantOfShape", [f"{name}.shape"], [name]))
            nodes[-1].attribute.append(zero)
        inputs.append(name)
    return [*nodes, helper.make_node("Concat", inputs, node.output, node.name, axis=attributes(node)["axis"])]


def _where_gradient(rewriter: Rewriter, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """`Where(condition, dY, 0)` and `Where(condition, 0, dY)`, which should have the shape of the operand."""
    if node.op_type != "Where":
        return None
    place = next((place for place in (1, 2) if (node.input[0], node.input[place]) in rewriter.choices), None)
    if place is None or not node.input[3 - place].startswith("ZeroConstant"):
        return None
    forward = rewriter.choices[node.input[0], node.input[place]]
    operand, result = forward.input[place], node.output[0]
    if rewriter.same_shape(operand, forward.output[0]):
        return None
    rewriter.reshaped.add(result)
    prefix = f"{node.name or result}.sum"
    kind, domain = ("ReduceSum", "") if rewriter.opset >= 13 else ("ReduceSumTraining", "com.microsoft")
    names = {key: f"{prefix}.{key}" for key in ("all", "shape", "all_shape", "axes", "unused", "summed")}
    return [
        helper.make_node("Where", node.input, [names["all"]], node.name),
        helper.make_node("Shape", [operand], [names["shape"]]),
        helper.make_node("Shape", [names["all"]], [names["all_shape"]]),
        helper.make_node(
            "BroadcastGradientArgs", [names["shape"], names["all_shape"]], [names["axes"], names["unused"]], domain="com.microsoft"
        ),
        helper.make_node(kind, [names["all"], names["axes"]], [names["summed"]], domain=domain, keepdims=1, noop_with_empty_axes=1),
        helper.make_node("Reshape", [names["summed"], names["shape"]], [result]),
    ]
