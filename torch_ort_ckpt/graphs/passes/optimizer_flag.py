"""AdamW graphs of ORT 1.14 and 1.15: their output that says whether an update took place is declared as int64.

Later releases, whose kernel writes a boolean, refuse such a graph.
"""

from __future__ import annotations

import onnx


def declare_flag_boolean(model: onnx.ModelProto) -> int:
    flags = {node.output[0] for node in model.graph.node if node.op_type == "AdamWOptimizer"}
    count = 0
    for value in model.graph.output:
        if value.name in flags and value.type.tensor_type.elem_type == onnx.TensorProto.INT64:
            value.type.tensor_type.elem_type = onnx.TensorProto.BOOL
            count += 1
    return count
