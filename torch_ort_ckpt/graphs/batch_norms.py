"""The BatchNorms of a training graph, and which running statistics they update."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from .description import attributes


@dataclass(frozen=True)
class BatchNorm:
    """A BatchNormalization of the training graph: the names of its result and of its running statistics."""

    output: str
    mean: str
    variance: str
    momentum: float


def batch_norms(model: onnx.ModelProto) -> list[BatchNorm]:
    """The BatchNorms whose running statistics the training graph updates, in its order. A layer used twice is there twice."""
    found = []
    roots = {value.name: value.name for value in model.graph.input}
    for node in model.graph.node:
        if node.op_type == "Identity" and node.input[0] in roots:  # the second use of a layer reads its statistics through one
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


def _trains_statistics(node: onnx.NodeProto) -> bool:
    return node.op_type == "BatchNormInternal" or (node.op_type == "BatchNormalization" and bool(attributes(node).get("training_mode")))
