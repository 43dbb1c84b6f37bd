"""Training artifacts as a joint graph of standard operators, which any onnxruntime runs.

Artifacts that `export_artifacts` wrote have such a graph inside: what ONNX Runtime's training API needs around it is taken off. Those that
ORT made have gradient kernels of the training build: their gradients are built again from the forward graph.
"""

from __future__ import annotations

import json
import logging
from weakref import WeakKeyDictionary

import onnx
import torch

from ...errors import MissingFileError, UnsupportedError
from ..artifacts import Artifacts
from ..description import COUNTERS, all_nodes
from ..gradients.contract import WRITE, JointGraph, joint_graph, training_model

logger = logging.getLogger(__name__)


def is_standard(model: onnx.ModelProto) -> bool:
    """Whether a training model has standard operators only, apart from those that add up gradients."""
    return all(node.domain in ("", "ai.onnx") or node.op_type == WRITE for node in all_nodes(model.graph))


def lowered(artifacts: Artifacts) -> tuple[JointGraph, dict[str, int]]:
    """The joint graph of the artifacts, and the buffers that grow by a constant in every step."""
    model = artifacts.training
    if model is None:
        if artifacts.training_path is None:
            raise MissingFileError("no training_model", path=artifacts.folder, remedy="Export the artifacts with one.")
        raise UnsupportedError("only ONNX Runtime reads .ort models", path=artifacts.training_path, remedy="Keep training_model.onnx.")
    if not is_standard(model):
        model = _rebuilt(artifacts)
    return joint_graph(model, [spec.name for spec in artifacts.inputs]), counters_of(model)


_REBUILT: WeakKeyDictionary[Artifacts, onnx.ModelProto] = WeakKeyDictionary()
"""Training models made again from their forward graphs: that takes seconds, and copies of a module share their artifacts."""


def _rebuilt(artifacts: Artifacts) -> onnx.ModelProto:
    """The training model with gradients that PyTorch makes. Buffers that are overwritten are read before that, as in our artifacts."""
    from ..gradients.rebuild import rebuilt

    if artifacts not in _REBUILT:
        logger.info("building the gradients again, which ONNX Runtime made with operators of its training builds")
        with torch.inference_mode(False), torch.enable_grad():  # the caller may be in no_grad, and PyTorch is to differentiate
            model, changed = training_model(rebuilt(artifacts).graph, list(artifacts.parameters))
        if changed:
            raise UnsupportedError(
                "a step changes this buffer of whole numbers, which the graph reads too", field=min(changed), remedy='Use engine="torch".'
            )
        _REBUILT[artifacts] = model
    return _REBUILT[artifacts]


def counters_of(model: onnx.ModelProto) -> dict[str, int]:
    """Integer buffers that a step only counts up (`num_batches_tracked`): buffer -> by how much."""
    found = next((item.value for item in model.metadata_props if item.key == COUNTERS), "{}")
    return {str(name): int(count) for name, count in json.loads(found).items()}
