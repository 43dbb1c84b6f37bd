"""`If`, `Loop` and `Scan`: a branch known at translation is inlined, the others run as submodules under Python control flow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx
import torch
from torch import Tensor, fx

from ...errors import UnsupportedError
from .constants import read_tensor
from .host import Host

if TYPE_CHECKING:
    from .translate import GraphBuilder


def add_control_flow(builder: GraphBuilder, node: onnx.NodeProto, attributes: dict[str, Any]) -> Any:
    """Add the node; returns its results in order (a list of values, or the graph node of a tuple)."""
    if node.op_type == "If":
        return _add_if(builder, node, attributes)
    if node.op_type == "Loop":
        return _add_loop(builder, node, attributes)
    return _add_scan(builder, node, attributes)


def run_if(condition: Any, then_branch: Any, else_branch: Any, then_args: Any, else_args: Any) -> Any:
    """The results of the branch taken; a condition computed from shapes is a Python bool and costs no synchronisation."""
    return then_branch(*then_args) if condition else else_branch(*else_args)


def run_loop(body: Any, trips: Any, condition: Any, state: Any, captured: Any, stacked: int) -> Any:
    """ONNX Loop: `body(i, condition, *state)` gives the next condition and state, and `stacked` values to collect."""
    count = None if trips is None else int(trips)
    going = True if condition is None else bool(condition)
    collected: Any = [[] for _ in range(stacked)]
    i = 0
    while going and (count is None or i < count):
        result = body(i, going, *state, *captured)
        going = bool(result[0])
        state = result[1 : 1 + len(state)]
        for values, value in zip(collected, result[len(result) - stacked :], strict=True):
            values.append(value)
        i += 1
    return (*state, *(torch.stack(values) if values else torch.empty(0) for values in collected))


def run_scan(
    body: Any, state: Any, scanned: Any, captured: Any, input_axes: Any, output_axes: Any, reverse_in: Any, reverse_out: Any
) -> Any:
    """ONNX Scan: `body(*state, *slices)` along an axis of each scanned input."""
    slices = [value.unbind(axis)[:: -1 if back else 1] for value, axis, back in zip(scanned, input_axes, reverse_in, strict=True)]
    collected: Any = [[] for _ in output_axes]
    for items in zip(*slices, strict=True):
        result = body(*state, *items, *captured)
        state = result[: len(state)]
        for values, value in zip(collected, result[len(state) :], strict=True):
            values.append(value)
    outputs = (torch.stack(v[:: -1 if back else 1], axis) for v, axis, back in zip(collected, output_axes, reverse_out, strict=True))
    return (*state, *outputs)


def _add_if(builder: GraphBuilder, node: onnx.NodeProto, attributes: dict[str, Any]) -> Any:
    condition = builder.value(node.input[0])
    if isinstance(condition, Host) and condition.constant:
        taken = attributes["then_branch" if condition.value else "else_branch"]
        return _inline(builder, taken)
    branches = [_subgraph(builder, attributes[name]) for name in ("then_branch", "else_branch")]
    value = condition.value if isinstance(condition, Host) else condition
    call = builder.graph.call_function(
        run_if, (value, *(builder.submodule(module) for module, _ in branches), *(tuple(captured) for _, captured in branches))
    )
    return _results(builder, call, len(node.output))


def _add_loop(builder: GraphBuilder, node: onnx.NodeProto, attributes: dict[str, Any]) -> Any:
    body = attributes["body"]
    module, captured = _subgraph(builder, body, numbers={0: torch.int64, 1: torch.bool}, host_outputs=(0,))
    trips, condition = (_raw(builder.value(name)) for name in node.input[:2])
    state = tuple(builder.tensor(name) for name in node.input[2:])
    stacked = len(body.output) - 1 - len(state)
    call = builder.graph.call_function(run_loop, (builder.submodule(module), trips, condition, state, tuple(captured), stacked))
    return _results(builder, call, len(node.output))


def _add_scan(builder: GraphBuilder, node: onnx.NodeProto, attributes: dict[str, Any]) -> Any:
    if builder.opsets.get("", 1) < 9:
        raise UnsupportedError(
            "Scan with a batch axis (opset 8)", field=node.name or node.output[0], remedy="Export with opset 9 or later."
        )
    body, count = attributes["body"], attributes["num_scan_inputs"]
    module, captured = _subgraph(builder, body)
    values = [builder.tensor(name) for name in node.input]
    state, scanned = tuple(values[: len(values) - count]), tuple(values[len(values) - count :])
    produced = len(body.output) - len(state)
    settings = [
        tuple(attributes.get(f"scan_{name}", [0] * length))
        for name, length in (("input_axes", count), ("output_axes", produced), ("input_directions", count), ("output_directions", produced))
    ]
    call = builder.graph.call_function(run_scan, (builder.submodule(module), state, scanned, tuple(captured), *settings))
    return _results(builder, call, len(node.output))


def _subgraph(
    builder: GraphBuilder, graph: onnx.GraphProto, numbers: dict[int, torch.dtype] | None = None, host_outputs: tuple[int, ...] = ()
) -> tuple[fx.GraphModule, list[Any]]:
    """The body as a module of its inputs and of the outer values it captures; inputs in `numbers` arrive as Python numbers."""
    inner = type(builder)(builder.opsets, outer=builder)
    for place, value in enumerate(graph.input):
        dtype = (numbers or {}).get(place)
        inner.add_input(value.name, *(() if dtype is None else (0, dtype)))
    _fill(inner, graph)
    return inner.finish([value.name for value in graph.output], host=host_outputs), inner.captured


def _inline(builder: GraphBuilder, graph: onnx.GraphProto) -> list[Any]:
    _fill(builder, graph)
    return [builder.value(value.name) for value in graph.output]


def _fill(builder: GraphBuilder, graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        builder.add_constant(tensor.name, read_tensor(tensor))
    builder.add_nodes(graph.node)


def _results(builder: GraphBuilder, call: fx.Node, count: int) -> list[Any]:
    import operator

    return [builder.graph.call_function(operator.getitem, (call, place)) for place in range(count)]


def _raw(value: Any) -> Tensor | Any:
    return value.value if isinstance(value, Host) else value
