"""Weights that the exporter names differently from the module: a tied weight has several names, and exporters choose another one."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ..description import all_nodes


def rename_initializers(model: onnx.ModelProto, names: Mapping[str, str]) -> int:
    """Rename the weights that `names` (old -> new) has."""
    count = 0
    for item in [*model.graph.initializer, *model.graph.input, *model.graph.value_info]:
        if item.name in names:
            item.name = names[item.name]
            count += 1
    for node in all_nodes(model.graph):
        for index, name in enumerate(node.input):
            if name in names:
                node.input[index] = names[name]
                count += 1
    return count
