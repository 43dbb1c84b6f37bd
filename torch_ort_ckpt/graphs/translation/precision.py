"""Graphs computed in another floating-point type than they were exported in: `model.bfloat16()`, `.half()`, `.double()` and FSDP2's
mixed precision.

A graph exported in float32 has float32 constants, and numbers that it makes of shapes and integers (positions, masks). They stay float32
until they meet a value of the model's type, and then take that type. So a rotary embedding's angles are not rounded to bfloat16, as they
are not in the module that was exported.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .ops_microsoft import batch_norm_internal
from .ops_nn import batch_norm
from .ops_sequence import concat_from_sequence
from .ops_shape import cast_like

_KEPT: dict[Callable[..., Any], tuple[int, ...]] = {batch_norm_internal: (3, 4), batch_norm: (3, 4), cast_like: (0, 1)}
"""Arguments that keep their own type: running statistics, one of which is written in place."""
_MAX_HALF = torch.finfo(torch.float16).max


def one_type(*values: Any) -> Any:
    """The values, whose float tensors have one type: if some are float32 and the others of another type, then that one."""
    kind = None
    for dtype in _float_types(values):
        if kind is None or kind == torch.float32:
            kind = dtype
        elif dtype not in (kind, torch.float32):
            kind = torch.promote_types(kind, dtype)
    return tuple(_converted(value, kind) for value in values)


def in_any_type(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, on the same constants, whose operators get their arguments in one type."""
    graph = copy.deepcopy(module.graph)
    for node in list(graph.nodes):
        kept = _KEPT.get(node.target, ())
        places = [place for place, arg in enumerate(node.args) if _is_value(arg) and place not in kept]
        if node.op != "call_function" or "onnx" not in node.meta or not any(isinstance(node.args[place], fx.Node) for place in places):
            continue
        if len(places) == 1 and node.target is not concat_from_sequence:
            continue
        with graph.inserting_before(node):
            same = graph.call_function(one_type, tuple(node.args[place] for place in places))
            for number, place in enumerate(places):
                node.update_arg(place, graph.call_function(operator.getitem, (same, number)))
    changed = fx.GraphModule(module, graph, class_name="OnnxGraph")
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(changed, name, in_any_type(child))
    return changed


def model_type(tensors: Sequence[Tensor], exported: Sequence[torch.dtype | None]) -> torch.dtype | None:
    """The type that tensors exported as float32 have now, if they all have one other; None if they have not changed or differ."""
    found = None
    for tensor, dtype in zip(tensors, exported, strict=True):
        if dtype is torch.float32 and tensor.dtype is not dtype:
            if found is not None and found is not tensor.dtype:
                return None
            found = tensor.dtype
    return found


def _is_value(arg: Any) -> bool:
    return isinstance(arg, fx.Node) or (isinstance(arg, float) and abs(arg) > _MAX_HALF)


def _float_types(values: Any) -> list[torch.dtype]:
    found: list[torch.dtype] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                found.append(value.dtype)
        elif isinstance(value, (list, tuple)):
            found += _float_types(value)
    return found


def _converted(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        if dtype is None or not value.is_floating_point() or value.dtype == dtype:
            return value
        return _to_half(value) if dtype == torch.float16 else value.to(dtype)
    if isinstance(value, list):
        return [_converted(item, dtype) for item in value]
    if isinstance(value, float) and dtype == torch.float16 and not math.isinf(value):
        return max(-_MAX_HALF, min(value, _MAX_HALF))
    return value


def _to_half(value: Tensor) -> Tensor:
    """Keep finite numbers finite: the -1e9 of an attention mask would become minus infinity, and a row of them NaN."""
    return torch.where(value.isinf(), value, value.clamp(-_MAX_HALF, _MAX_HALF)).to(torch.float16)
