"""InstanceNormalization (also what GroupNorm is exported to), which has no gradient in ORT.

It is written out as mean, variance, scale and shift. A node whose input has no known rank stays: ORT reports the missing gradient.
"""

from __future__ import annotations

import numpy as np
import onnx

from ..description import attributes, standard_opset
from ..shapes import typed_values
from .rewriting import NewNodes, replace_nodes


def decompose_instance_norm(model: onnx.ModelProto) -> int:
    if all(node.op_type != "InstanceNormalization" for node in model.graph.node):
        return 0
    opset = standard_opset(model)
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in typed_values(model)}

    def rewrite(node: onnx.NodeProto) -> NewNodes | None:
        rank = ranks.get(node.input[0], 0) if node.op_type == "InstanceNormalization" else 0
        return _decomposed(node, rank, opset) if rank >= 3 else None

    return replace_nodes(model, rewrite)


def _decomposed(node: onnx.NodeProto, rank: int, opset: int) -> NewNodes:
    source, scale, shift = node.input
    new = NewNodes(f"{node.output[0]}.decomposed")
    axes = list(range(2, rank))

    def mean(value: str) -> str:
        if opset >= 18:
            return new.add("ReduceMean", value, new.constant(axes), keepdims=1)
        return new.add("ReduceMean", value, axes=axes, keepdims=1)

    channel_shape = new.constant([1, -1] + [1] * len(axes))
    epsilon = new.constant(float(attributes(node).get("epsilon", 1e-5)), np.float32)
    centred = new.add("Sub", source, mean(source))
    variance = mean(new.add("Mul", centred, centred))
    normal = new.add("Div", centred, new.add("Sqrt", new.add("Add", variance, epsilon)))
    scaled = new.add("Mul", normal, new.add("Reshape", scale, channel_shape))
    new.add("Add", scaled, new.add("Reshape", shift, channel_shape), output=node.output[0])
    return new
