"""Symbolic dimensions replaced by numbers."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx.shape_inference


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
