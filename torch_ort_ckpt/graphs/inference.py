"""`export_inference`: an ONNX model with the trained weights inside, cut from the eval graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import torch
from onnx import helper

from ..checkpoint.state import nbytes
from ..dtypes import ONNX_FROM_TORCH
from ..errors import CheckpointError, MissingFileError, UnsupportedError
from ..formats.onnx.checkpoint import write_model
from ..storage.files import tensor_bytes
from ..storage.paths import PathLike, as_path
from .artifacts import Artifacts
from .description import all_nodes
from .passes.forward import cap_ir_version, typed_values

INLINE_LIMIT = 1 << 30
"""Weights larger than this go into a file `<path>.<hash>.data` next to the model (a protobuf holds 2 GiB at most)."""


def export_inference(
    artifacts: Artifacts, tensors: Mapping[str, torch.Tensor], path: PathLike, outputs: Sequence[str] | None = None
) -> None:
    """Write the part of the eval graph that `outputs` need, with `tensors` as its weights.

    `outputs` may name any value of the eval graph; without it all extra outputs are taken, or the loss where there are none. Inputs that
    are then no longer needed (the labels) disappear.
    """
    path = as_path(path)
    if artifacts.eval is None:
        raise MissingFileError(
            "no eval_model.onnx to cut an inference model from", path=artifacts.folder, remedy="Export the artifacts with an eval model."
        )
    model = inference_model(artifacts.eval, artifacts, outputs)
    values = {name: _current(name, artifacts, tensors) for name in _weight_names(model, artifacts)}
    external = sum(nbytes(value) for value in values.values()) > INLINE_LIMIT
    outside = []
    for name, value in values.items():
        item = _tensor(name, value, with_data=not external)
        model.graph.initializer.append(item)
        if external and value.numel():
            outside.append((model.graph.initializer[-1], value))
    write_model(model, outside, path)


def inference_model(graph_model: onnx.ModelProto, artifacts: Artifacts, outputs: Sequence[str] | None) -> onnx.ModelProto:
    """The nodes between the inputs and `outputs`; weights stay inputs without values."""
    model = onnx.ModelProto()
    model.CopyFrom(graph_model)
    cap_ir_version(model)
    graph = model.graph
    declared = {value.name: value for value in graph.output}
    wanted = list(outputs) if outputs is not None else [value.name for value in graph.output][1:] or [graph.output[0].name]
    producers = {name: node for node in graph.node for name in node.output if name}
    if unknown := [name for name in wanted if name not in producers]:
        raise CheckpointError(
            f"the eval graph computes no {unknown[0]!r}",
            path=artifacts.eval_path,
            field=unknown[0],
            remedy=f"It has, among others: {', '.join(dict.fromkeys([*declared, *list(producers)[-5:]]))}.",
        )
    needed, waiting, kept = set(wanted), list(wanted), set()
    while waiting:
        node = producers.get(waiting.pop())
        if node is None or id(node) in kept:
            continue
        kept.add(id(node))
        inner = [name for body in _bodies(node) for deep in all_nodes(body) for name in deep.input]
        for name in [*node.input, *inner]:
            if name and name not in needed:
                needed.add(name)
                waiting.append(name)
    inferred = {value.name: value for value in typed_values(model)} if any(name not in declared for name in wanted) else {}
    nodes = [node for node in graph.node if id(node) in kept]
    inputs = [value for value in graph.input if value.name in needed]
    constants = [tensor for tensor in graph.initializer if tensor.name in needed]
    unknown_type = onnx.TensorProto.FLOAT
    chosen = [declared.get(name) or inferred.get(name) or helper.make_tensor_value_info(name, unknown_type, None) for name in wanted]
    for field, values in ((graph.node, nodes), (graph.input, inputs), (graph.initializer, constants), (graph.output, chosen)):
        copies = [type(value).FromString(value.SerializeToString()) for value in values]
        del field[:]
        field.extend(copies)
    del graph.value_info[:]
    return model


def _weight_names(model: onnx.ModelProto, artifacts: Artifacts) -> list[str]:
    """Take the weights out of the graph's inputs."""
    weights = [value.name for value in model.graph.input if value.name in artifacts.parameters or value.name in artifacts.aliases]
    inputs = [value for value in model.graph.input if value.name not in weights]
    copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in inputs]
    del model.graph.input[:]
    model.graph.input.extend(copies)
    return weights


def _current(name: str, artifacts: Artifacts, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    master = artifacts.aliases.get(name)
    if master is None:
        return tensors[name].detach()
    dtype = next(spec.dtype for spec in artifacts.eval_inputs if spec.name == name)
    return tensors[master].detach().to(dtype)


def _tensor(name: str, value: torch.Tensor, with_data: bool) -> onnx.TensorProto:
    number = ONNX_FROM_TORCH.get(value.dtype)
    if number is None:
        raise UnsupportedError(f"ONNX has no element type {value.dtype}", field=name)
    item = onnx.TensorProto(name=name, data_type=number, dims=list(value.shape))
    if with_data or not value.numel():
        item.raw_data = tensor_bytes(value).tobytes() if value.numel() else b""
    return item


def _bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [item.g for item in node.attribute if item.type == onnx.AttributeProto.GRAPH]
