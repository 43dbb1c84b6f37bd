"""The part of a graph that some of its values need: an inference model is cut from the eval graph this way.

Nodes, inputs (the labels) and constants that only the loss reads disappear.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from ...errors import CheckpointError
from ..shapes import typed_values
from .onnx_ir_models import as_ir, as_proto


def keep_outputs(model: onnx.ModelProto, outputs: Sequence[str], path: Path | None = None) -> int:
    """Make `outputs`, which may be any values that the graph computes, its outputs. Returns how many nodes were removed."""
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    changed = as_ir(model)
    graph = changed.graph
    values = {value.name: value for node in graph for value in node.outputs if value.name}
    if unknown := [name for name in outputs if name not in values]:
        names = dict.fromkeys([*(value.name or "" for value in graph.outputs), *list(values)[-5:]])
        raise CheckpointError(
            f"the graph computes no {unknown[0]!r}", path=path, field=unknown[0], remedy=f"It has, among others: {', '.join(names)}."
        )
    chosen, count = [values[name] for name in outputs], len(graph)
    if unclear := [value for value in chosen if value.type is None or value.shape is None]:
        known = {value.name: value for value in typed_values(model)}
        for value in unclear:
            if value.name in known:
                ir.serde.deserialize_value_info_proto(known[value.name], value)
            elif value.type is None:  # ONNX wants a type for every output; what can't be inferred is taken for float32
                value.type = ir.TensorType(ir.DataType.FLOAT)
    graph.outputs[:] = chosen
    RemoveUnusedNodesPass()(changed)
    graph.inputs[:] = [value for value in graph.inputs if value.uses() or value.is_graph_output()]
    model.CopyFrom(as_proto(changed))
    del model.graph.value_info[:]
    return count - len(graph)
