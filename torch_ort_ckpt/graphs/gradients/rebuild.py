"""The gradients of a graph that is already there: training artifacts of any origin, through their forward graph as PyTorch.

ONNX Runtime's gradient operators are left out: the forward part becomes an `nn.Module`, which PyTorch differentiates like any other.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import torch
from torch import nn

from ...errors import CheckpointError, MissingFileError, UnsupportedError
from ..artifacts import Artifacts
from ..batch_norms import batch_norms
from ..description import COUNTERS, LABELS, all_nodes, copy_of
from ..source.module import to_torch_module
from .capture import Dynamic
from .contract import JointGraph
from .example_batch import batch_of, open_sizes
from .torch_builder import Gradients, build

_log = logging.getLogger(__name__)


def rebuilt(
    artifacts: Artifacts,
    *,
    example_inputs: Sequence[torch.Tensor] | None = None,
    dynamic_shapes: Dynamic | None = None,
    opset: int | None = None,
    tell: Callable[[str], None] = _log.info,
) -> Gradients:
    """The joint graph of artifacts, with the names of their inputs, outputs, parameters and sizes. The eval graph stays as it is.

    Nothing is written and nothing is asked: a batch to trace with is made from the graph's inputs, unless one is given.
    """
    if artifacts.training_path is None:
        raise MissingFileError("no training_model", path=artifacts.folder, remedy="Export the artifacts with one.")
    if artifacts.training is None:
        raise UnsupportedError("only ONNX Runtime reads .ort models", path=artifacts.training_path, remedy="Keep training_model.onnx.")
    module = forward_module(artifacts)
    inputs = [spec.name for spec in artifacts.inputs]
    values = batch_of(artifacts.inputs, module) if example_inputs is None else list(example_inputs)
    if len(values) != len(inputs):
        raise CheckpointError(f"{len(values)} example inputs for {len(inputs)} ({', '.join(inputs)})", field="example_inputs")
    taken = argument_names(module)
    sizes = open_sizes(artifacts.inputs) if dynamic_shapes is None else dynamic_shapes
    extras = len(artifacts.outputs) > 1
    found = build(
        module,
        values,
        None,
        extra_outputs=extras,
        dynamic_shapes={taken[inputs.index(name)]: axes for name, axes in sizes.items()},
        opset=opset,
        evaluation=False,
        tell=tell,
    )
    names = dict(zip(taken, inputs, strict=True))
    names |= dict(zip([found.graph.loss, *found.graph.extras], [spec.name for spec in artifacts.outputs], strict=True))
    graph = with_names(found.graph, names)
    _add_counters(graph.model, artifacts)
    evaluation = copy_of(artifacts.eval) if artifacts.eval is not None else None
    _copy_labels(artifacts.training, graph.model)
    if evaluation is not None:
        _copy_labels(graph.model, evaluation)
    return Gradients(graph, found.program, evaluation, found.trainable, found.states)


def forward_module(artifacts: Artifacts, outputs: Sequence[str] | None = None) -> nn.Module:
    """The graphs as a module whose state is that of the artifacts: constants of the graph are no part of it."""
    module = to_torch_module(artifacts, outputs=outputs)
    for name, value in list(module.named_buffers(recurse=False)):
        if name not in artifacts.parameters:
            delattr(module, name)
            module.register_buffer(name, value, persistent=False)
    return module


def argument_names(module: nn.Module) -> list[str]:
    """What the forward of a module made by `to_torch_module` calls its inputs: their names as far as Python allows."""
    return list(inspect.signature(module.forward).parameters)


def with_names(joint: JointGraph, names: Mapping[str, str]) -> JointGraph:
    """The same graph (changed in place) with other names for its inputs, its loss and its extra outputs."""
    rename_values(joint.model, names)
    return JointGraph(
        joint.model,
        [names.get(name, name) for name in joint.inputs],
        names.get(joint.loss, joint.loss),
        [names.get(name, name) for name in joint.extras],
        joint.gradients,
        joint.updates,
    )


def rename_values(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Rename values of a graph, in place; a value that already has one of the new names gets another one."""
    graph = model.graph
    known = {name for node in all_nodes(graph) for name in (*node.input, *node.output)}
    known |= {value.name for value in (*graph.input, *graph.output)} | {tensor.name for tensor in graph.initializer}
    new = {old: name for old, name in names.items() if old != name}
    if taken := sorted({value.name for value in graph.input}.intersection(new.values()).difference(new)):
        raise UnsupportedError(f"{taken[0]!r} would be the name of two values", field=taken[0], remedy="Rename one of them in the graph.")
    for name in set(new.values()) & known - set(new):
        new[name] = f"{name}.value"
    for node in all_nodes(graph):
        for part in (node.input, node.output):
            part[:] = [new.get(name, name) for name in part]
    for holder in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        holder.name = new.get(holder.name, holder.name)
    for entry in model.metadata_props:
        if entry.key == LABELS:
            entry.value = json.dumps({new.get(name, name): about for name, about in json.loads(entry.value).items()})


def _add_counters(model: onnx.ModelProto, artifacts: Artifacts) -> None:
    """What a step counts outside the graph, which the forward does not show: BatchNorm's batches in graphs that ORT made."""
    assert artifacts.training is not None
    counters = Counter(f"{norm.mean.rpartition('.')[0]}.num_batches_tracked" for norm in batch_norms(artifacts.training))
    found = {name: count for name, count in counters.items() if name in artifacts.state.parameters} | artifacts.counters
    if found:
        model.metadata_props.add(key=COUNTERS, value=json.dumps(found))


def _copy_labels(source: onnx.ModelProto, target: onnx.ModelProto) -> None:
    """What a graph records about its labels holds for the others of the set too."""
    text: Any = next((entry.value for entry in source.metadata_props if entry.key == LABELS), None)
    if text is not None and all(entry.key != LABELS for entry in target.metadata_props):
        target.metadata_props.add(key=LABELS, value=text)
