"""Graphs stamped with a newer version than ONNX Runtime loads, though they use nothing of it.

The `onnx` package stamps what it makes with its own newest IR version, so that ONNX Runtime 1.19.2 refuses the optimizer graphs it has
just made itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from ...graphs.description import all_nodes
from ...graphs.passes.forward import MAX_IR_VERSION

_MAX_OPSET = 21
"""The newest of the standard operators that ORT 1.19.2 knows."""
_NEWEST_TYPE = onnx.TensorProto.INT4
"""The newest element type of that IR version."""


def as_ort_loads(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with versions lowered as far as it needs (a copy). One that does use something newer stays: ORT will name it."""
    lowered = model.ir_version > MAX_IR_VERSION and not _uses_newer(model)
    unused = [index for index, item in enumerate(model.opset_import) if _is_standard(item.domain) and item.version > _MAX_OPSET]
    if any(_is_standard(node.domain) for node in all_nodes(model.graph)) or model.functions:
        unused = []
    if not lowered and not unused:
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    if lowered:
        changed.ir_version = MAX_IR_VERSION
    for index in unused:
        changed.opset_import[index].version = _MAX_OPSET
    return changed


def _is_standard(domain: str) -> bool:
    return domain in ("", "ai.onnx")


def _uses_newer(model: onnx.ModelProto) -> bool:
    """Element types, or devices of nodes, that came after the last IR version that ORT loads."""
    graph = model.graph
    kinds = [tensor.data_type for tensor in graph.initializer]
    kinds += [value.type.tensor_type.elem_type for value in [*graph.input, *graph.output, *graph.value_info]]
    kinds += [item.t.data_type for node in all_nodes(graph) for item in node.attribute if item.type == onnx.AttributeProto.TENSOR]
    kinds += [item.i for node in all_nodes(graph) for item in node.attribute if node.op_type == "Cast" and item.name == "to"]
    return any(kind > _NEWEST_TYPE for kind in kinds) or _has(model, "configuration") or _any_has(all_nodes(graph), "device_configurations")


def _has(message: object, field: str) -> bool:
    return len(getattr(message, field, ())) > 0  # onnx before 1.18 does not know these fields


def _any_has(messages: Iterable[object], field: str) -> bool:
    return any(_has(message, field) for message in messages)
