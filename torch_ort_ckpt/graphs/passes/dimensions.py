"""Symbolic dimensions whose size the user fixes (`OrtModule(..., dimensions={"batch": 8})`).

Inner values get the size too: ORT's kernels for the gradients of pools take their shape from there.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx


def fix_dimensions(model: onnx.ModelProto, sizes: Mapping[str, int]) -> int:
    count = 0
    for value in [*model.graph.input, *model.graph.output, *model.graph.value_info]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
                count += 1
    return count
