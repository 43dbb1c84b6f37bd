"""LayerNormalization, Dropout and SoftmaxCrossEntropyLoss without their optional outputs.

Exporters leave out what the forward pass does not read. ORT's gradient builder reads these outputs without checking whether they exist.
"""

from __future__ import annotations

import onnx

from ..description import all_nodes

_WANTED = {"LayerNormalization": ("mean", "inv_std_dev"), "Dropout": ("mask",), "SoftmaxCrossEntropyLoss": ("log_prob",)}


def complete_outputs(model: onnx.ModelProto) -> int:
    count = 0
    for node in all_nodes(model.graph):
        suffixes = _WANTED.get(node.op_type, ())
        if len(node.output) < 1 + len(suffixes):
            for suffix in suffixes[len(node.output) - 1 :]:
                node.output.append(f"{node.output[0]}.{suffix}")
            count += 1
    return count
