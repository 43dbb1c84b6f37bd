"""Gradients of pools that have no fixed shape in the graph.

ORT's kernels for AveragePoolGrad and MaxPoolGrad take the shape of their result from the graph. Where ORT's gradient builder left it out,
it is the shape of the pool's input, which inference finds as soon as the sizes of the graph's inputs are fixed.
"""

from __future__ import annotations

import onnx

from ..shapes import fixed, infer_forward, shapes
from .rewriting import set_items


def infer_pool_shapes(model: onnx.ModelProto) -> int:
    known = shapes(model)
    forward = {f"{node.output[0]}_grad": node for node in model.graph.node if node.op_type in ("AveragePool", "MaxPool")}
    pools = {
        node.output[0]: forward[node.input[0]].input[0]
        for node in model.graph.node
        if node.op_type in ("AveragePoolGrad", "MaxPoolGrad") and node.input[0] in forward
    }
    if all(fixed(known.get(name, (None, None))[1:]) for name in pools):
        return 0
    inferred = infer_forward(model)
    found = {name: inferred[source] for name, source in pools.items() if source in inferred}
    set_items(model.graph.value_info, [value for value in model.graph.value_info if value.name not in found])
    for name, value in found.items():
        model.graph.value_info.add().CopyFrom(value)
        model.graph.value_info[-1].name = name
    return len(found)
