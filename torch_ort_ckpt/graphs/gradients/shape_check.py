"""Stage 4: the sizes that were asked to be dynamic still are.

A tracer can turn a dynamic size into a constant without an error: in the user's code (`int(x.shape[0])`), or in a kernel for fake tensors
when the joint graph is made.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from ...errors import UnsupportedError
from .capture import Captured, Dynamic
from .private_export import symbol_before, symbol_of
from .where import line_of_stack

_log = logging.getLogger(__name__)


Symbols = list[list[str | None]]
"""For each of the user's inputs, the symbol of each axis; None for a fixed one."""


def symbols(program: ExportedProgram) -> Symbols:
    """To be taken before the joint graph is made: both graphs share their symbols, and one that becomes a number does so in both."""
    return [[symbol_of(size) for size in value.shape] for value in _values(program)]


def compare_shapes(captured: Captured, before: Symbols, program: ExportedProgram, places: Sequence[int] | None = None) -> None:
    """Raise if the joint graph has lost a dynamic size that the captured graph had. `places` are those of the user's among its inputs."""
    after = [value.shape for value in _values(program)]
    if places is not None:
        after = [after[place] for place in places]
    # A target's size that nobody asked for may become a number: that of the module's output.
    asked = captured.required
    named = zip(captured.inputs, before, strict=True)
    wanted = {symbol for name, old in named for axis, symbol in enumerate(old) if asked is None or axis in asked.get(name, ())} - {None}
    for name, old, new in zip(captured.inputs, before, after, strict=True):
        for axis, (symbol, now) in enumerate(zip(old, new, strict=True)):
            if symbol in wanted and symbol_of(now) is None:
                raise UnsupportedError(
                    f"axis {axis} of input {name!r} is dynamic in the module, but became {now} when PyTorch made its gradients",
                    remedy="Leave that axis out of dynamic_shapes, or replace the operator that fixes it (often a pad or a Fourier "
                    "transform) with torch_ort_ckpt.register_decomposition.",
                )


def check_captured(captured: Captured, dynamic: Dynamic, required: Mapping[str, Mapping[int, str]]) -> dict[str, str]:
    """Raise if a required dimension came out fixed, or as the same as another; returns symbol -> the name that was asked for."""
    names: dict[str, str] = {}
    shapes = dict(zip(captured.inputs, _values(captured.program), strict=True))
    for key, axes in dynamic.items():
        for axis, name in axes.items():
            if key not in shapes:
                continue
            symbol = symbol_of(shapes[key].shape[axis])
            if symbol is None:
                if axis in required.get(key, {}):
                    raise fixed(name, key, axis, int(shapes[key].shape[axis]), _line(captured, key, shapes[key], axis))
                _log.info("axis %d of input %r is fixed to %s by the module", axis, key, shapes[key].shape[axis])
                continue
            other = names.setdefault(symbol, name)
            if other != name and axis in required.get(key, {}) and not name.startswith("?"):
                raise UnsupportedError(
                    f"dimension {name!r} (axis {axis} of input {key!r}) must equal {other!r} in this module",
                    remedy=f"Give both the same name in dynamic_shapes, or fix {name!r}.",
                )
    return names


def fixed(name: str, key: str, axis: int, size: int, line: str | None) -> UnsupportedError:
    return UnsupportedError(
        f"dimension {name!r} was asked to be dynamic, but the module fixes it: axis {axis} of input {key!r} came out as {size}",
        field=line,
        remedy="Leave it out of dynamic_shapes (dynamic_shapes={} fixes all sizes), or make the forward independent of that size.",
    )


def _line(captured: Captured, key: str, value: torch.Tensor, axis: int) -> str | None:
    """The user's line that fixes an axis of an input."""
    symbol = symbol_before(value, captured.inputs.index(key), axis)
    return line_of_stack(captured.fixed.get(symbol)) if symbol is not None else None


def _values(program: ExportedProgram) -> list[Any]:
    users = list(program.graph_signature.user_inputs)
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return [nodes[str(name)].meta["val"] for name in users]
