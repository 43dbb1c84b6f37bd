"""Shape arithmetic on Python numbers: `Shape`, then what exporters do to it, evaluated at translation where the numbers are known.

ONNX computes shapes with int64 tensors. As tensors they would be read back at every Reshape; as Python ints they cost nothing, and
`torch.compile` and `torch.export` can follow them symbolically.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .constants import plain_numbers

MAX_CONSTANT = 64
"""Longer integer constants are data (an index table), not a shape."""


@dataclass(frozen=True)
class Host:
    """A number (`rank` 0) or tuple of numbers (`rank` 1). `value` holds Python numbers, graph nodes that will be numbers when the graph
    runs, a tuple of either, or, for a tuple whose length is not known yet, one node."""

    value: Any
    rank: int
    dtype: torch.dtype = torch.int64

    @property
    def constant(self) -> bool:
        return not any(isinstance(part, fx.Node) for part in (self.value if isinstance(self.value, tuple) else (self.value,)))


def host_constant(tensor: torch.Tensor) -> Host | None:
    """The constant as Python numbers if it is a scalar or a short list of ints; None if it should stay a tensor."""
    if tensor.dim() == 0 and not tensor.is_complex():
        return Host(plain_numbers(tensor), 0, tensor.dtype)
    if tensor.dim() == 1 and tensor.dtype in (torch.int64, torch.int32) and tensor.numel() <= MAX_CONSTANT:
        return Host(tuple(tensor.tolist()), 1, tensor.dtype)
    return None


def fold_host(graph: fx.Graph, operator_name: str, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
    """Run an ONNX node on host values, or None if it must run on tensors. `inputs`: `Host`s, None for those left out, and for `Shape`
    and `Size` the tensor's node."""
    rule = _RULES.get(operator_name)
    if rule is None:
        return None
    if operator_name not in ("Shape", "Size") and not all(value is None or isinstance(value, Host) for value in inputs):
        return None
    try:
        return rule(_Emitter(graph), inputs, attributes)
    except (ArithmeticError, IndexError, ValueError):  # what Python's numbers refuse, such as 1.0 / 0.0, tensors may have an answer for
        return None


def number_to_int(value: Any) -> Any:
    """`int`, leaving symbolic ints as they are."""
    return value if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool) else int(value)


def floor_toward_zero(a: Any, b: Any) -> Any:
    """ONNX's integer division truncates; sizes are never negative, so that the common case stays symbolic."""
    return a // b if (a >= 0) == (b > 0) else -((-a) // b)


def square_root(value: Any) -> Any:
    return torch.sym_sqrt(value) if isinstance(value, (torch.SymInt, torch.SymFloat)) else math.sqrt(value)


def each(name: str, *values: Any) -> Any:
    """Apply the named function elementwise over tuples, with ONNX's broadcasting of scalars and one-element tuples."""
    wide = [value if isinstance(value, tuple) else (value,) for value in values]
    length = max(len(value) for value in wide) if all(wide) else 0
    return tuple(ELEMENTWISE[name](*(value[0] if len(value) == 1 else value[i] for value in wide)) for i in range(length))


def pick(values: Any, indices: Any) -> Any:
    return tuple(values[i] for i in indices)


def choose(condition: Any, a: Any, b: Any) -> Any:
    return a if condition else b


def product(values: Any) -> Any:
    return math.prod(values)


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.mod, operator.neg, operator.abs, max, min),
        *(operator.eq, operator.lt, operator.le, operator.gt, operator.ge, operator.not_, operator.and_, operator.or_, operator.truth),
        *(choose, floor_toward_zero, square_root, number_to_int, torch.sym_float),
    )
}
"""By name, because a graph's arguments can be numbers and strings but not functions."""


class _Emitter:
    """Calls a function now if its arguments are known, else adds the call to the graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        if any(isinstance(part, fx.Node) for arg in args for part in (arg if isinstance(arg, tuple) else (arg,))):
            return self.graph.call_function(function, args)
        return function(*args)

    def elementwise(self, function: Callable[..., Any], hosts: list[Host], dtype: torch.dtype | None = None) -> Host:
        rank = max(host.rank for host in hosts)
        values = [host.value for host in hosts]
        dtype = dtype or hosts[-1].dtype
        if rank == 0:
            return Host(self(function, *values), 0, dtype)
        if any(host.rank == 1 and not isinstance(host.value, tuple) for host in hosts):
            return Host(self.graph.call_function(each, (function.__name__, *values)), 1, dtype)
        wide = [value if isinstance(value, tuple) else (value,) for value in values]
        length = max(len(value) for value in wide) if all(wide) else 0
        parts = tuple(self(function, *(value[0] if len(value) == 1 else value[i] for value in wide)) for i in range(length))
        return Host(parts, 1, dtype)


_Rule = Callable[[_Emitter, list[Any], dict[str, Any]], "Host | None"]
_RULES: dict[str, _Rule] = {}


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def add(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def _elementwise(name: str, function: Callable[..., Any], dtype: torch.dtype | None = None) -> None:
    _RULES[name] = lambda emit, inputs, attributes: emit.elementwise(function, inputs, dtype) if not attributes else None


def _extreme(name: str, function: Callable[..., Any]) -> None:
    """Max and Min take any number of inputs. Of one, Python's functions would take it for a list; of floats, one may be NaN."""

    def rule(emit: _Emitter, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
        if len(inputs) == 1:
            return Host(inputs[0].value, inputs[0].rank, inputs[0].dtype)
        return emit.elementwise(function, inputs) if not inputs[0].dtype.is_floating_point else None

    _RULES[name] = rule


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Neg": operator.neg,
    "Abs": operator.abs,
    "Where": choose,
}
_COMPARISON: dict[str, Callable[..., Any]] = {
    "Equal": operator.eq,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Not": operator.not_,
    "And": operator.and_,
    "Or": operator.or_,
}
for _name, _function in _ARITHMETIC.items():
    _elementwise(_name, _function)
for _name, _function in _COMPARISON.items():
    _elementwise(_name, _function, torch.bool)
_extreme("Max", max)
_extreme("Min", min)


@_rule("Shape")
def _shape(emit: _Emitter, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
    (value,) = inputs
    whole: Any
    if isinstance(value, Host):
        if value.rank == 1 and not isinstance(value.value, tuple):
            whole = (emit(len, value.value),)
        else:
            whole = (len(value.value),) if value.rank else ()
    else:
        whole = emit(getattr, value, "shape")
    start, end = attributes.get("start", 0), attributes.get("end")
    single = end == start + 1 != 0 or (start, end) == (-1, None)
    if single and not isinstance(whole, tuple):  # one dimension, which exporters squeeze next
        return Host((emit(operator.getitem, whole, start),), 1)
    if start or end is not None:
        whole = emit(operator.getitem, whole, slice(start, end))
    return Host(whole, 1)


@_rule("Size")
def _size(emit: _Emitter, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
    (value,) = inputs
    if isinstance(value, Host):
        return Host(emit(len, value.value) if value.rank else 1, 0)
    return Host(emit(torch.Tensor.numel, value), 0)


@_rule("Div")
def _div(emit: _Emitter, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
    whole = not inputs[0].dtype.is_floating_point
    return emit.elementwise(floor_toward_zero if whole else operator.truediv, inputs)


@_rule("Mod")
def _mod(emit: _Emitter, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
    return emit.elementwise(operator.mod, inputs) if not attributes.get("fmod") else None


@_rule("Sqrt")
def _sqrt(emit: _Emitter, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
    return emit.elementwise(square_root, inputs)


@_rule("Cast")
def _cast(emit: _Emitter, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
    to = attributes["to"]
    if to in (torch.int64, torch.int32):
        return emit.elementwise(number_to_int, inputs, to)
    if to in (torch.float32, torch.float64):
        return emit.elementwise(torch.sym_float, inputs, to)
    if to == torch.bool:
        return emit.elementwise(operator.truth, inputs, to)
    return None


@_rule("Gather")
def _gather(emit: _Emitter, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
    data, index = inputs
    if data.rank != 1:
        return None
    if index.rank == 0:
        known = isinstance(data.value, tuple) and index.constant
        item = data.value[index.value] if known else emit.graph.call_function(operator.getitem, (data.value, index.value))
        return Host(item, 0, data.dtype)
    if isinstance(data.value, tuple) and index.constant:
        return Host(pick(data.value, index.value), 1, data.dtype)
    if isinstance(index.value, tuple):
        parts = tuple(emit.graph.call_function(operator.getitem, (data.value, place)) for place in index.value)
        return Host(parts, 1, data.dtype)
    return Host(emit(pick, data.value, index.value), 1, data.dtype)


@_rule("Slice")
def _slice(emit: _Emitter, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
    if len(inputs) < 3:  # before opset 10: attributes
        starts, ends, steps = attributes["starts"], attributes["ends"], (1,)
    else:
        starts, ends = inputs[1].value, inputs[2].value
        steps = inputs[4].value if len(inputs) > 4 and inputs[4] is not None else (1,)
    if not all(isinstance(value, (tuple, list)) and len(value) == 1 for value in (starts, ends, steps)):
        return None
    place = slice(starts[0], ends[0], steps[0])
    known = not any(isinstance(part, fx.Node) for part in (place.start, place.stop, place.step))
    whole = inputs[0].value
    if known and not isinstance(whole, tuple) and place.stop == place.start + 1 != 0 and place.step == 1:  # one dimension of a shape
        return Host((emit(operator.getitem, whole, place.start),), 1, inputs[0].dtype)
    if not known or not isinstance(whole, tuple):
        return Host(emit.graph.call_function(operator.getitem, (whole, place)), 1, inputs[0].dtype)
    return Host(inputs[0].value[place], 1, inputs[0].dtype)


@_rule("Concat")
def _concat(emit: _Emitter, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
    if any(value.rank != 1 for value in inputs):
        return None
    whole: Any = inputs[0].value
    for value in inputs[1:]:
        known = isinstance(whole, tuple) and isinstance(value.value, tuple)
        whole = whole + value.value if known else emit.graph.call_function(operator.add, (whole, value.value))
    return Host(whole, 1, inputs[0].dtype)


@_rule("Unsqueeze")
def _unsqueeze(emit: _Emitter, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
    axes = inputs[1].value if len(inputs) > 1 else attributes["axes"]
    single = isinstance(axes, int) or (isinstance(axes, (tuple, list)) and len(axes) == 1)
    return Host((inputs[0].value,), 1, inputs[0].dtype) if inputs[0].rank == 0 and single else None


@_rule("Squeeze")
def _squeeze(emit: _Emitter, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
    value = inputs[0].value
    if inputs[0].rank == 0:
        return None
    if isinstance(value, tuple):
        return Host(value[0], 0, inputs[0].dtype) if len(value) == 1 else None
    axes = inputs[1] if len(inputs) > 1 else attributes.get("axes")
    if axes is None:  # whether there is anything to squeeze depends on its length
        return None
    return Host(emit(operator.getitem, value, 0), 0, inputs[0].dtype)


@_rule("Reshape")
def _reshape(emit: _Emitter, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
    shape = inputs[1].value
    if not isinstance(shape, tuple) or len(shape) > 1:
        return None
    value, rank, dtype = inputs[0].value, inputs[0].rank, inputs[0].dtype
    if len(shape) == 1:
        return Host(value if rank else (value,), 1, dtype) if _fits(value, rank, shape[0]) else None
    if rank == 0:
        return Host(value, 0, dtype)
    if isinstance(value, tuple):
        return Host(value[0], 0, dtype) if len(value) == 1 else None
    return Host(emit(operator.getitem, value, 0), 0, dtype)


def _fits(value: Any, rank: int, size: Any) -> bool:
    """Whether a number, or a tuple, can have this size as its only dimension, as far as that is known here."""
    unknown = isinstance(size, fx.Node) or (rank == 1 and not isinstance(value, tuple))
    return unknown or size in (-1, len(value) if rank else 1)


@_rule("ConstantOfShape")
def _constant_of_shape(emit: _Emitter, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
    value = attributes.get("value", torch.zeros(1))
    if not inputs[0].constant or len(inputs[0].value) != 1 or inputs[0].value[0] > MAX_CONSTANT or value.dtype != torch.int64:
        return None
    return Host((value.item(),) * inputs[0].value[0], 1)


@_rule("ReduceProd")
def _reduce_prod(emit: _Emitter, inputs: list[Any], attributes: dict[str, Any]) -> Host | None:
    if inputs[0].rank != 1 or attributes.get("noop_with_empty_axes"):
        return None
    whole = emit(product, inputs[0].value)
    return Host((whole,), 1, inputs[0].dtype) if attributes.get("keepdims", 1) else Host(whole, 0, inputs[0].dtype)
