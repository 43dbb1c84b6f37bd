"""New values of buffers (BatchNorm's running statistics) as outputs. Graphs whose gradients PyTorch made overwrite the old ones instead.

PyTorch's buffers are updated after the run, so that a run that fails leaves them as they were. The flags of the overwriting nodes, which
the loss waits for, become constants.
"""

from __future__ import annotations

import onnx

from .direct_gradients import ACCUMULATOR, accumulates


def updated_buffers(model: onnx.ModelProto) -> dict[str, str]:
    """Buffer -> the output that `direct_updates` adds to this model for its new value."""
    return {node.input[0]: node.input[1] for node in model.graph.node if node.op_type == ACCUMULATOR and not accumulates(node)}


def direct_updates(model: onnx.ModelProto) -> int:
    graph = model.graph
    buffers = updated_buffers(model)
    shapes = {value.name: value for value in graph.input}
    for node in graph.node:
        if node.op_type == ACCUMULATOR and not accumulates(node):
            node.CopyFrom(onnx.helper.make_node("Identity", [node.input[2]], [node.output[0]]))
    for name, value in buffers.items():
        output = onnx.ValueInfoProto()
        output.CopyFrom(shapes[name])
        output.name = value
        graph.output.append(output)
    return len(buffers)
