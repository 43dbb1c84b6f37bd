"""CastLike, which has no gradient in ORT. Where the type of its second input is known, it is a Cast."""

from __future__ import annotations

import onnx
from onnx import helper

from ..description import all_nodes
from ..shapes import element_types


def replace_cast_like(model: onnx.ModelProto) -> int:
    nodes = [node for node in all_nodes(model.graph) if node.op_type == "CastLike"]
    if not nodes:
        return 0
    types = element_types(model)
    count = 0
    for node in nodes:
        kind = types.get(node.input[1])
        if kind:
            node.op_type = "Cast"
            del node.input[1:]
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("to", kind))
            count += 1
    return count
