"""Gradients as outputs of their own: ORT's training graph adds them to accumulation buffers, and PyTorch adds them up itself."""

from __future__ import annotations

import onnx
import onnx.shape_inference

from ..description import (
    ACCUMULATION_BUFFER,
    ACCUMULATION_OUTPUT,
    LAZY_RESET,
    gradient_names,
)


def direct_gradients(model: onnx.ModelProto) -> onnx.ModelProto:
    """The training graph with the gradients themselves as outputs, in place of nodes that add them to buffers.

    PyTorch accumulates gradients, and writing a gradient directly to its destination saves one pass over memory.
    """
    gradients = gradient_names(model)
    shapes = {value.name: value for value in model.graph.input}
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    kept = [node for node in graph.node if node.op_type != "InPlaceAccumulatorV2"]
    outputs = [value for value in graph.output if not value.name.endswith(ACCUMULATION_OUTPUT)]
    inputs = [value for value in graph.input if not value.name.endswith(ACCUMULATION_BUFFER) and value.name != LAZY_RESET]
    produced = {name for node in kept for name in node.output}
    seen = {value.name for value in outputs}
    for parameter, name in gradients.items():
        if name not in produced or name in seen:  # a constant, or one value that is the gradient of two parameters
            name, source = f"{parameter}{ACCUMULATION_OUTPUT}.value", name
            kept.append(onnx.helper.make_node("Identity", [source], [name]))
        seen.add(name)
        output = onnx.ValueInfoProto()
        output.CopyFrom(shapes[parameter + ACCUMULATION_BUFFER])
        output.name = name
        outputs.append(output)
    for field, values in ((graph.node, kept), (graph.output, outputs), (graph.input, inputs)):
        del field[:]
        field.extend(values)
    return changed


def direct_gradient_names(model: onnx.ModelProto) -> dict[str, str]:
    """Parameter -> output of the graph that `direct_gradients` makes of this model."""
    produced = {name for node in model.graph.node if node.op_type != "InPlaceAccumulatorV2" for name in node.output}
    seen = {value.name for value in model.graph.output}
    names = {}
    for parameter, name in gradient_names(model).items():
        names[parameter] = f"{parameter}{ACCUMULATION_OUTPUT}.value" if name not in produced or name in seen else name
        seen.add(names[parameter])
    return names
