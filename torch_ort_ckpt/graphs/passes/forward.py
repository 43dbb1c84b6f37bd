"""Fixes for what exporters write and ORT 1.19.2 can't differentiate or load. Every fix keeps the mathematics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..description import PADDING, all_nodes, attributes, with_inferred_shapes

MAX_IR_VERSION = 10
"""The newest that ORT 1.19.2 loads."""


def repair_forward(model: onnx.ModelProto) -> list[str]:
    """Make an exported forward graph differentiable for ORT (in place); returns what was done, for the log."""
    done = []
    repairs: Iterable[tuple[str, Callable[[onnx.ModelProto], int]]] = (
        ("counted Transpose's axes from the front", count_axes_from_front),
        ("gave LayerNormalization, Dropout and SoftmaxCrossEntropyLoss the outputs their gradients need", complete_outputs),
        ("replaced CastLike by Cast", replace_cast_like),
        ("decomposed InstanceNormalization", decompose_instance_norm),
        ("removed Transposes without effect", remove_identity_transposes),
    )
    for text, repair in repairs:
        if count := repair(model):
            done.append(f"{text} ({count})")
    if cap_ir_version(model):
        done.append(f"lowered the IR version to {MAX_IR_VERSION}")
    return done


def cap_ir_version(model: onnx.ModelProto) -> bool:
    too_new = model.ir_version > MAX_IR_VERSION
    if too_new:
        model.ir_version = MAX_IR_VERSION
    return bool(too_new)


def count_axes_from_front(model: onnx.ModelProto) -> int:
    """PyTorch's older exporter keeps the negative axes of `permute(0, -1, 1)`; ONNX does not allow them there."""
    count = 0
    for node in all_nodes(model.graph):
        for item in node.attribute:
            if node.op_type == "Transpose" and item.name == "perm" and any(axis < 0 for axis in item.ints):
                item.ints[:] = [axis + len(item.ints) if axis < 0 else axis for axis in item.ints]
                count += 1
    return count


def complete_outputs(model: onnx.ModelProto) -> int:
    """The gradient builder reads the optional outputs of these nodes whether they are there or not (`OutputDefs().size()`)."""
    wanted = {"LayerNormalization": ("mean", "inv_std_dev"), "Dropout": ("mask",), "SoftmaxCrossEntropyLoss": ("log_prob",)}
    count = 0
    for node in all_nodes(model.graph):
        suffixes = wanted.get(node.op_type, ())
        if len(node.output) < 1 + len(suffixes):
            for suffix in suffixes[len(node.output) - 1 :]:
                node.output.append(f"{node.output[0]}.{suffix}")
            count += 1
    return count


def replace_cast_like(model: onnx.ModelProto) -> int:
    """CastLike has no gradient; with the type known it is a Cast."""
    nodes = [node for node in all_nodes(model.graph) if node.op_type == "CastLike"]
    if not nodes:
        return 0
    types = element_types(model)
    count = 0
    for node in nodes:
        kind = types.get(node.input[1])
        if kind:
            node.op_type = "Cast"
            del node.input[1:]
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("to", kind))
            count += 1
    return count


def decompose_instance_norm(model: onnx.ModelProto) -> int:
    """InstanceNormalization (GroupNorm exports to it) has no gradient: written out as mean, variance, scale and shift."""
    opset = next(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in typed_values(model)}
    nodes, count = [], 0
    for node in model.graph.node:
        if node.op_type != "InstanceNormalization":
            nodes.append(node)
            continue
        rank = ranks.get(node.input[0], 0)
        if rank < 3:  # rank or shape unknown: not replaced, ORT will report the missing gradient
            nodes.append(node)
            continue
        nodes.extend(_instance_norm_nodes(model, node, rank, opset))
        count += 1
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return count


def remove_identity_transposes(model: onnx.ModelProto) -> int:
    """ORT's graph optimizer assumes that any Transpose before a Gemm swaps rows and columns."""
    count = 0
    for node in all_nodes(model.graph):
        perm = list(attributes(node).get("perm", ())) if node.op_type == "Transpose" else []
        if perm and perm == sorted(perm):
            node.op_type = "Identity"
            del node.attribute[:]
            count += 1
    return count


def single_batch_norm_outputs(model: onnx.ModelProto) -> int:
    """Outside training BatchNormalization has one output; the exporter's training graph leaves more."""
    count = 0
    for node in all_nodes(model.graph):
        if node.op_type == "BatchNormalization" and len(node.output) > 1 and not attributes(node).get("training_mode"):
            del node.output[1:]
            count += 1
    return count


def stop_padding_gradients(model: onnx.ModelProto, padding: Mapping[str, int]) -> int:
    """Zero the gradient of the padding row of embeddings (weight -> row) in a training graph, in place: Gather has no such attribute.

    The forward node records it too, for code that differentiates the forward part again: see `graphs.padding_row`.
    """
    opset = next(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
    lookups = {
        f"{node.output[0]}_grad": node
        for node in model.graph.node
        if node.op_type == "Gather" and node.input[0] in padding and not attributes(node).get("axis", 0)
    }
    for node in lookups.values():
        node.doc_string = f"{PADDING}{padding[node.input[0]]}"
    nodes, count = [], 0
    for node in model.graph.node:
        if node.op_type == "GatherGrad" and node.input[2] in lookups:
            nodes.extend(_without_padding(model, node, padding[lookups[node.input[2]].input[0]], opset))
            count += 1
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return count


def _without_padding(model: onnx.ModelProto, node: onnx.NodeProto, row: int, opset: int) -> list[onnx.NodeProto]:
    """Nodes that put zeros in place of the gradient at every index that is `row`."""
    prefix = f"{node.name or node.output[0]}.padding"
    names = {key: f"{prefix}.{key}" for key in ("indices", "row", "equal", "mask", "zero", "axis", "gradient")}
    kind = element_types(model).get(node.input[2], onnx.TensorProto.FLOAT)
    model.graph.initializer.append(numpy_helper.from_array(np.array(row, np.int64), names["row"]))
    model.graph.initializer.append(helper.make_tensor(names["zero"], kind, [], [0.0]))
    if opset >= 13:
        model.graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), names["axis"]))
        unsqueeze = helper.make_node("Unsqueeze", [names["equal"], names["axis"]], [names["mask"]])
    else:
        unsqueeze = helper.make_node("Unsqueeze", [names["equal"]], [names["mask"]], axes=[-1])
    gradient, node.input[2] = node.input[2], names["gradient"]
    return [
        helper.make_node("Cast", [node.input[1]], [names["indices"]], to=onnx.TensorProto.INT64),
        helper.make_node("Equal", [names["indices"], names["row"]], [names["equal"]]),
        unsqueeze,
        helper.make_node("Where", [names["mask"], names["zero"], gradient], [names["gradient"]]),
    ]


def rename_initializers(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Give weights the names the module has for them (in place)."""
    if not names:
        return
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for value in [*model.graph.input, *model.graph.value_info]:
        value.name = names.get(value.name, value.name)
    for node in all_nodes(model.graph):
        for index, name in enumerate(node.input):
            if name in names:
                node.input[index] = names[name]


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Value -> element type, as far as inference finds it."""
    types = {value.name: value.type.tensor_type.elem_type for value in typed_values(model)}
    types |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    return {name: kind for name, kind in types.items() if kind}


def typed_values(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Every value whose type is known or can be inferred."""
    slim = onnx.ModelProto()
    slim.CopyFrom(model)
    for tensor in slim.graph.initializer:  # inference needs shapes of weights, not their data
        if tensor.raw_data and len(tensor.raw_data) > 4096:
            slim.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    kept = [tensor for tensor in slim.graph.initializer if not (tensor.raw_data and len(tensor.raw_data) > 4096)]
    del slim.graph.initializer[:]
    slim.graph.initializer.extend(kept)
    graph = with_inferred_shapes(slim).graph
    return [value for value in [*graph.input, *graph.output, *graph.value_info] if value.type.HasField("tensor_type")]


def _instance_norm_nodes(model: onnx.ModelProto, node: onnx.NodeProto, rank: int, opset: int) -> list[onnx.NodeProto]:
    source, scale, shift = node.input
    out = node.output[0]
    axes = list(range(2, rank))

    def constant(suffix: str, values: list[int] | list[float], floating: bool) -> str:
        name = f"{out}.{suffix}"
        array = np.array(values, np.float32 if floating else np.int64)
        if not any(tensor.name == name for tensor in model.graph.initializer):
            model.graph.initializer.append(numpy_helper.from_array(array.reshape(()) if floating else array, name))
        return name

    def mean(value: str, result: str) -> onnx.NodeProto:
        if opset >= 18:
            return helper.make_node("ReduceMean", [value, constant("axes", axes, False)], [result], keepdims=1)
        return helper.make_node("ReduceMean", [value], [result], axes=axes, keepdims=1)

    shape = constant("channel_shape", [1, -1] + [1] * len(axes), False)
    epsilon = constant("epsilon", [float(attributes(node).get("epsilon", 1e-5))], True)
    names = {
        key: f"{out}.{key}" for key in ("mean", "centred", "square", "variance", "sum", "deviation", "normal", "scale", "shift", "scaled")
    }
    return [
        mean(source, names["mean"]),
        helper.make_node("Sub", [source, names["mean"]], [names["centred"]]),
        helper.make_node("Mul", [names["centred"], names["centred"]], [names["square"]]),
        mean(names["square"], names["variance"]),
        helper.make_node("Add", [names["variance"], epsilon], [names["sum"]]),
        helper.make_node("Sqrt", [names["sum"]], [names["deviation"]]),
        helper.make_node("Div", [names["centred"], names["deviation"]], [names["normal"]]),
        helper.make_node("Reshape", [scale, shape], [names["scale"]]),
        helper.make_node("Reshape", [shift, shape], [names["shift"]]),
        helper.make_node("Mul", [names["normal"], names["scale"]], [names["scaled"]]),
        helper.make_node("Add", [names["scaled"], names["shift"]], [out]),
    ]
