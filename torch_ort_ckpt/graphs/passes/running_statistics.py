"""BatchNormalization in training mode, in a forward graph that is compared with its module.

Exporters differ in how they write BatchNorm in training mode, so the comparison uses the running statistics on both sides.
"""

from __future__ import annotations

import onnx

from ..description import all_nodes
from .rewriting import set_items


def use_running_statistics(model: onnx.ModelProto) -> int:
    count = 0
    for node in all_nodes(model.graph):
        if node.op_type == "BatchNormalization":
            del node.output[1:]
            set_items(node.attribute, [item for item in node.attribute if item.name != "training_mode"])
            count += 1
    return count
