"""Accumulation buffers with another shape than their parameter.

ORT's gradient builder gives a buffer the shape that it infers for the gradient: a wrong one where the gradient itself is wrong (a Where
that broadcasts, a Split with an unused part).
"""

from __future__ import annotations

import onnx

from ..description import ACCUMULATION_BUFFER


def shape_gradient_buffers(model: onnx.ModelProto) -> int:
    inputs = {value.name: value.type.tensor_type for value in model.graph.input}
    count = 0
    for value in model.graph.input:
        parameter = value.name.removesuffix(ACCUMULATION_BUFFER)
        if parameter == value.name or parameter not in inputs or value.type.tensor_type.shape == inputs[parameter].shape:
            continue
        value.type.tensor_type.shape.CopyFrom(inputs[parameter].shape)
        count += 1
    return count
