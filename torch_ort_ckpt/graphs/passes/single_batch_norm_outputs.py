"""BatchNormalization with several outputs outside training mode.

PyTorch's exporter writes a graph for training; the eval graph that ORT's tools derive from it keeps the outputs for the updated running
statistics. Outside training mode ONNX allows one output only.
"""

from __future__ import annotations

import onnx

from ..description import all_nodes, attributes


def single_batch_norm_outputs(model: onnx.ModelProto) -> int:
    count = 0
    for node in all_nodes(model.graph):
        if node.op_type == "BatchNormalization" and len(node.output) > 1 and not attributes(node).get("training_mode"):
            del node.output[1:]
            count += 1
    return count
