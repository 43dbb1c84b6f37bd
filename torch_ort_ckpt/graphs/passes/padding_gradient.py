"""Embeddings with a `padding_idx`, the row that takes no gradient from lookups.

They are exported as Gather, which has no such attribute, so ORT's gradient (GatherGrad) changes that row too. Nodes in front of GatherGrad
put zeros in place of the gradient wherever the index is the padding row. The forward node records the row as well, for code that
differentiates the forward part again: see `description.padding_row`.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ..description import PADDING, attributes, standard_opset
from ..shapes import element_types
from .rewriting import NewNodes, replace_nodes


def stop_padding_gradients(model: onnx.ModelProto, padding: Mapping[str, int]) -> int:
    """`padding`: weight -> row."""
    lookups = {
        f"{node.output[0]}_grad": node
        for node in model.graph.node
        if node.op_type == "Gather" and node.input[0] in padding and not attributes(node).get("axis", 0)
    }
    if not lookups:
        return 0
    for node in lookups.values():
        node.doc_string = f"{PADDING}{padding[node.input[0]]}"
    types, opset = element_types(model), standard_opset(model)

    def rewrite(node: onnx.NodeProto) -> NewNodes | None:
        if node.op_type != "GatherGrad" or node.input[2] not in lookups:
            return None
        indices, gradient = node.input[1:3]
        new = NewNodes(f"{node.output[0]}.padding")
        row = new.constant(padding[lookups[gradient].input[0]])
        zero = new.scalar(0.0, types.get(gradient, onnx.TensorProto.FLOAT))
        found = new.add("Equal", new.add("Cast", indices, to=onnx.TensorProto.INT64), row)
        mask = new.add("Unsqueeze", found, new.constant([-1])) if opset >= 13 else new.add("Unsqueeze", found, axes=[-1])
        node.input[2] = new.add("Where", mask, zero, gradient)
        new.nodes.append(node)
        return new

    return replace_nodes(model, rewrite)
