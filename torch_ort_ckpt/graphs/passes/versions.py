"""Graphs marked with a newer version than ONNX Runtime loads, though they use none of its features.

The `onnx` package marks what it creates with its own newest IR version. ONNX Runtime 1.19.2 then refuses even the optimizer graphs it has
just created itself. A graph that does use newer features keeps its version: ORT's error will name them.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from ..description import all_nodes

MAX_IR_VERSION = 10
"""The newest that ORT 1.19.2 loads."""
_MAX_OPSET = 21
"""The newest version of the standard operators that ORT 1.19.2 supports."""
_NEWEST_TYPE = onnx.TensorProto.INT4
"""The newest element type of that IR version."""


def lower_versions(model: onnx.ModelProto) -> int:
    count = 0
    if model.ir_version > MAX_IR_VERSION and not _uses_newer(model):
        model.ir_version = MAX_IR_VERSION
        count += 1
    if any(_is_standard(node.domain) for node in all_nodes(model.graph)) or model.functions:
        return count
    for item in model.opset_import:
        if _is_standard(item.domain) and item.version > _MAX_OPSET:
            item.version = _MAX_OPSET
            count += 1
    return count


def _is_standard(domain: str) -> bool:
    return domain in ("", "ai.onnx")


def _uses_newer(model: onnx.ModelProto) -> bool:
    """Element types, or devices of nodes, that are newer than the last IR version that ORT loads."""
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
