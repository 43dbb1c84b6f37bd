"""Gradients as outputs of their own. ORT's training graphs add them to accumulation buffers instead.

PyTorch accumulates gradients itself, and writing a gradient directly to its destination saves one pass over memory.
"""

from __future__ import annotations

import onnx

from ..description import ACCUMULATION_BUFFER, ACCUMULATION_OUTPUT, LAZY_RESET, gradient_names
from .rewriting import set_items

ACCUMULATOR = "InPlaceAccumulatorV2"


def direct_gradients(model: onnx.ModelProto) -> int:
    graph = model.graph
    shapes = {value.name: value for value in graph.input}
    sources, names = gradient_names(model), direct_gradient_names(model)
    nodes = [node for node in graph.node if not accumulates(node)]
    outputs = [value for value in graph.output if not value.name.endswith(ACCUMULATION_OUTPUT)]
    for parameter, name in names.items():
        if name != sources[parameter]:
            nodes.append(onnx.helper.make_node("Identity", [sources[parameter]], [name]))
        output = onnx.ValueInfoProto()
        output.CopyFrom(shapes[parameter + ACCUMULATION_BUFFER])
        output.name = name
        outputs.append(output)
    set_items(graph.node, nodes)
    set_items(graph.output, outputs)
    set_items(graph.input, [value for value in graph.input if not value.name.endswith(ACCUMULATION_BUFFER) and value.name != LAZY_RESET])
    return len(names)


def direct_gradient_names(model: onnx.ModelProto) -> dict[str, str]:
    """Parameter -> the output with its gradient that `direct_gradients` makes of this model."""
    produced = {name for node in model.graph.node if not accumulates(node) for name in node.output}
    seen = {value.name for value in model.graph.output}
    names = {}
    for parameter, name in gradient_names(model).items():
        # A constant, or one value that is the gradient of two parameters, needs an output of another name.
        names[parameter] = f"{parameter}{ACCUMULATION_OUTPUT}.value" if name not in produced or name in seen else name
        seen.add(names[parameter])
    return names


def accumulates(node: onnx.NodeProto) -> bool:
    """Whether the node adds a gradient to its buffer. Such nodes also write other buffers (see `direct_updates`)."""
    return node.op_type == ACCUMULATOR and node.input[0].endswith(ACCUMULATION_BUFFER)
