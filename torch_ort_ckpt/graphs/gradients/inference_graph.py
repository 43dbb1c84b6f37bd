"""An inference model (`.onnx`) as something to train: which of its initializers are parameters, and what they are called.

Nothing in an ONNX file says what was a parameter. Weights have more than one element and are read by operators that compute with them;
shapes, scales of a Resize, masks and epsilons do not count.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.inliner
import torch
from onnx import helper

from ...checkpoint.state import CheckpointState
from ...errors import CheckpointError, UnsupportedError
from ..artifacts import Artifacts
from ..batch_norms import batch_norms
from ..description import DETACHED, all_nodes, load_model
from ..translation.constants import read_tensor

_SETTINGS: dict[str, tuple[int, ...]] = {
    "Resize": (1, 2, 3),
    "Upsample": (1,),
    "OneHot": (1, 2),
    "Where": (1, 2),
    "Clip": (1, 2),
    "Pow": (1,),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "NonMaxSuppression": (2, 3, 4),
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
    "DFT": (1, 2),
    "STFT": (1, 2, 3),
}
"""Inputs that are settings of an operator, not parameters."""
_STATISTICS = {"BatchNormalization": (3, 4)}
"""Inputs that are a module's buffers: kept in the checkpoint, never trained."""


def as_artifacts(path: Path) -> Artifacts:
    """The model with its weights in a checkpoint instead of the graph, in memory."""
    model = load_model(path, weights=True)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    _attach_outputs(model)
    _constants_to_initializers(model)
    trainable, frozen = _weights(model)
    if not trainable:
        half = any(tensor.data_type in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16) for tensor in model.graph.initializer)
        raise CheckpointError(
            "holds no weights of float32 to train",
            path=path,
            remedy="Export the model in float32." if half else "Give a model whose weights are initializers, not inputs or integers.",
        )
    values = {tensor.name: tensor for tensor in model.graph.initializer}
    tensors = {name: torch.as_tensor(read_tensor(values[name])) for name in (*trainable, *frozen)}
    state = CheckpointState(
        trainable={name: tensors[name] for name in trainable},
        frozen={name: tensors[name] for name in frozen},
    )
    _lift(model, [*trainable, *frozen])
    if batch_norms(model):
        raise UnsupportedError("a BatchNorm in training mode in an inference model", path=path, remedy="Export the model in eval mode.")
    found = Artifacts(folder=path.parent, eval_path=path, _state=state)
    found.eval = model
    return found


def _attach_outputs(model: onnx.ModelProto) -> None:
    """Let gradients flow from the outputs: in a model of `export_inference` they are extra outputs of a training graph, which have none."""
    wanted = {value.name for value in model.graph.output}
    for node in reversed(model.graph.node):
        if node.op_type == "Identity" and node.output[0] in wanted:
            wanted.add(node.input[0])
            if node.doc_string == DETACHED:
                node.doc_string = ""


def _weights(model: onnx.ModelProto) -> tuple[list[str], list[str]]:
    """The initializers to train, and those that are statistics."""
    graph = model.graph
    settings: set[str] = set()
    statistics: set[str] = set()
    for node in all_nodes(graph):
        for table, found in ((_SETTINGS, settings), (_STATISTICS, statistics)):
            found.update(node.input[place] for place in table.get(node.op_type, ()) if place < len(node.input) and not node.domain)
    trainable, frozen = [], []
    for tensor in graph.initializer:
        count = 1
        for size in tensor.dims:
            count *= size
        if tensor.data_type != onnx.TensorProto.FLOAT or tensor.name in settings:
            continue
        if tensor.name in statistics:
            frozen.append(tensor.name)
        elif tensor.dims and count > 1:
            trainable.append(tensor.name)
    return trainable, frozen


def _constants_to_initializers(model: onnx.ModelProto) -> None:
    """Some exporters write weights as Constant nodes."""
    graph = model.graph
    kept = []
    for node in graph.node:
        value = node.attribute[0].t if node.op_type == "Constant" and node.attribute[0].HasField("t") else None
        if value is None or value.data_type != onnx.TensorProto.FLOAT:
            kept.append(node)
            continue
        tensor = onnx.TensorProto()
        tensor.CopyFrom(value)
        tensor.name = node.output[0]
        graph.initializer.append(tensor)
    del graph.node[:]
    graph.node.extend(kept)


def _lift(model: onnx.ModelProto, names: list[str]) -> None:
    """Let these initializers be inputs without values."""
    graph = model.graph
    chosen = set(names)
    tensors = {tensor.name: tensor for tensor in graph.initializer if tensor.name in chosen}
    declared = {value.name for value in graph.input}
    graph.input.extend(
        helper.make_tensor_value_info(name, tensors[name].data_type, list(tensors[name].dims)) for name in names if name not in declared
    )
    kept = [tensor for tensor in graph.initializer if tensor.name not in chosen]
    del graph.initializer[:]
    graph.initializer.extend(kept)
