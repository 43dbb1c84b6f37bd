"""The gradient of a Where that broadcasts an operand.

ORT's gradient builder gives it the shape of the result (`Where(condition, dY, 0)`, `Where(condition, 0, dY)`). It must be summed to the
shape of the operand.
"""

from __future__ import annotations

import onnx

from ..description import spec_of, standard_opset
from .rewriting import NewNodes, replace_nodes, set_items


def sum_where_gradients(model: onnx.ModelProto) -> int:
    graph = model.graph
    forward = {(node.input[0], f"{node.output[0]}_grad"): node for node in graph.node if node.op_type == "Where"}
    shapes = {value.name: spec_of(value).shape for value in [*graph.value_info, *graph.output, *graph.input]}
    known = {name: shape for name, shape in shapes.items() if shape is not None and "?" not in shape}
    kind, domain = ("ReduceSum", "") if standard_opset(model) >= 13 else ("ReduceSumTraining", "com.microsoft")
    reshaped = set()

    def rewrite(node: onnx.NodeProto) -> NewNodes | None:
        if node.op_type != "Where":
            return None
        place = next((place for place in (1, 2) if (node.input[0], node.input[place]) in forward), None)
        if place is None or not node.input[3 - place].startswith("ZeroConstant"):
            return None
        source = forward[node.input[0], node.input[place]]
        operand, result = source.input[place], node.output[0]
        if operand in known and known[operand] == known.get(source.output[0]):  # symbolic dimensions are compared by their names
            return None
        reshaped.add(result)
        new = NewNodes(f"{result}.summed")
        wide, shape = new.add("Where", *node.input), new.add("Shape", operand)
        axes = f"{new.prefix}.axes"
        operands = [shape, new.add("Shape", wide)]
        new.add_several("BroadcastGradientArgs", operands, [axes, f"{new.prefix}.unused"], domain="com.microsoft")
        summed = new.add(kind, wide, axes, domain=domain, keepdims=1, noop_with_empty_axes=1)
        new.add("Reshape", summed, shape, output=result)
        return new

    count = replace_nodes(model, rewrite)
    if reshaped:
        set_items(graph.value_info, [value for value in graph.value_info if value.name not in reshaped])
    return count
