"""An optimizer's update as standard ONNX operators: the mathematics of `engines/updates.py` on values of a graph.

The rate is a float32 scalar, the step an int64 scalar that counts from 1. What depends on them alone is computed once, in float64: bias
corrections in float32 would cost 7e-4 after a few steps. Small parameters are joined to one vector, because a runtime spends more time on
starting an operator than on a thousand elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from ...checkpoint.state import OptimizerSpec
from ...errors import UnsupportedError
from .fragment import Fragment

JOINED = 20_000
"""Parameters of at most this many elements are updated together."""
_TINY = 1e-30
NEW = ".new"
"""What follows a state's name in the output that replaces it."""


@dataclass(frozen=True)
class Operand:
    """One tensor to update: a parameter, or several joined to a vector. Fields are names of values; `moments` may be empty (plain SGD)."""

    parameter: str
    gradient: str
    moments: tuple[str, ...]
    scalars: Scalars


def moments_of(spec: OptimizerSpec) -> tuple[str, ...]:
    """The optimizer's states of a parameter: what follows its name and a dot."""
    if spec.kind in ("AdamW", "Adam"):
        return ("momentum0", "momentum1")
    return ("momentum0",) if spec.momentum else ()


def add_update(
    graph: Fragment,
    spec: OptimizerSpec,
    shapes: Mapping[str, tuple[int, ...]],
    gradients: Mapping[str, str],
    *,
    rate: str = "lr",
    step: str = "step",
    joined: int = JOINED,
    types: Mapping[str, int] | None = None,
    scalars: Scalars | None = None,
) -> None:
    """Add the nodes that compute `<state>.new` for every parameter in `shapes` and its moments.

    `gradients` maps each parameter to the value with its gradient. Parameters of at most `joined` elements are updated as one vector.
    `types` has the element types of parameters that are not float32; their moments have the same. With `scalars` the graph has these values
    already, as float32, and does not compute them from rate and step.
    """
    types = {name: (types or {}).get(name, TensorProto.FLOAT) for name in shapes}
    if odd := next((name for name, kind in types.items() if kind not in (TensorProto.FLOAT, TensorProto.DOUBLE)), None):
        raise UnsupportedError("only float32 and float64 parameters can be updated in the graph", field=odd, remedy="Make it float32.")
    if spec.max_norm is not None:
        gradients = clipped(graph, gradients, spec.max_norm, types=types)
    for element in sorted(set(types.values())):
        values = scalars if scalars is not None else _scalars(graph, spec, rate, step, element)
        _of_one_type(graph, spec, values, {name: shape for name, shape in shapes.items() if types[name] == element}, gradients, joined)


def _of_one_type(
    graph: Fragment,
    spec: OptimizerSpec,
    scalars: Scalars,
    shapes: Mapping[str, tuple[int, ...]],
    gradients: Mapping[str, str],
    joined: int,
) -> None:
    """Update parameters of one element type."""
    kinds = moments_of(spec)
    small = [name for name, shape in shapes.items() if math.prod(shape) <= joined]
    small = small if len(small) > 1 else []
    for name in shapes:
        if name not in small:
            states = [name, *(f"{name}.{kind}" for kind in kinds)]
            _one(graph, spec, Operand(name, gradients[name], tuple(states[1:]), scalars), [f"{state}{NEW}" for state in states])
    if small:
        columns = [small, *([f"{name}.{kind}" for name in small] for kind in kinds)]
        vectors = [_join(graph, column, [shapes[name] for name in small]) for column in columns]
        gradient = _join(graph, [gradients[name] for name in small], [shapes[name] for name in small])
        made = [graph.fresh("joined") for _ in vectors]
        _one(graph, spec, Operand(vectors[0], gradient, tuple(vectors[1:]), scalars), made)
        for vector, column in zip(made, columns, strict=True):
            _part(graph, vector, column, [shapes[name] for name in small])


@dataclass(frozen=True)
class Scalars:
    """What an update needs of the rate and the step: names of values without dimensions, of the parameters' element type. `decay` is None
    if there is none."""

    rate: str
    decay: str | None = None
    factor: str = ""
    offset: str = ""
    kind: int = TensorProto.FLOAT

    @property
    def names(self) -> list[str]:
        return [name for name in (self.rate, self.decay, self.factor, self.offset) if name]

    @property
    def dtype(self) -> Any:
        return helper.tensor_dtype_to_np_dtype(self.kind)


def scalar_names(spec: OptimizerSpec) -> Scalars:
    """For a graph that takes these values as inputs (see `scalar_values`)."""
    decay = "decay" if spec.weight_decay and spec.kind == "AdamW" else None
    return Scalars("rate", decay) if spec.kind == "SGD" else Scalars("rate", decay, "factor", "offset")


def scalar_values(spec: OptimizerSpec, lr: float, step: int) -> dict[str, float]:
    """The values of `scalar_names`, by the same formulas as in the graph."""
    values = {"rate": lr, "decay": 1 - lr * spec.weight_decay}
    if spec.kind != "SGD":
        inverse = 1 / (lr if abs(lr) >= _TINY else _TINY)
        first, second = (1 - beta**step for beta in spec.betas) if spec.correct_bias else (1.0, 1.0)
        values["factor"] = inverse * first / math.sqrt(second)
        values["offset"] = (values["factor"] if spec.adam_mode == 1 and spec.correct_bias else inverse * first) * spec.eps
    return values


def _scalars(graph: Fragment, spec: OptimizerSpec, rate: str, step: str, kind: int) -> Scalars:
    """Nodes that compute the scalars, in float64."""
    lr = graph("Cast", rate, to=TensorProto.DOUBLE)
    own = rate if kind == TensorProto.FLOAT else lr
    one = graph.constant(1.0, np.float64)
    decay = None
    if spec.weight_decay and spec.kind == "AdamW":
        kept = graph("Sub", one, graph("Mul", lr, graph.constant(spec.weight_decay, np.float64)))
        decay = graph("Cast", kept, to=kind)
    if spec.kind == "SGD":
        return Scalars(own, decay, kind=kind)
    # p -= lr / c1 * m / (sqrt(v) / c2 + eps) is p -= m / (sqrt(v) * factor + offset), two operators less for each element.
    # A rate of zero would divide by zero: the smallest rate that is told from it moves no parameter either.
    tiny = graph.constant(_TINY, np.float64)
    inverse = graph("Div", one, graph("Where", graph("Less", graph("Abs", lr), tiny), tiny, lr))
    eps = graph.constant(spec.eps, np.float64)
    factor, offset = inverse, graph("Mul", inverse, eps)
    if spec.correct_bias:
        count = graph("Cast", step, to=TensorProto.DOUBLE)
        first, second = (graph("Sub", one, graph("Pow", graph.constant(beta, np.float64), count)) for beta in spec.betas)
        root = graph("Sqrt", second)
        factor = graph("Div", graph("Mul", inverse, first), root)
        # adam_mode 1 adds epsilon before the correction, as ORT's default does
        scale = factor if spec.adam_mode == 1 else graph("Mul", inverse, first)
        offset = graph("Mul", scale, eps)
    factor, offset = (graph("Cast", value, to=kind) for value in (factor, offset))
    return Scalars(own, decay, factor, offset, kind)


def _one(graph: Fragment, spec: OptimizerSpec, operand: Operand, made: list[str]) -> None:
    """Update one tensor; `made` are the names of the new parameter and moments."""
    if spec.kind == "SGD":
        _sgd(graph, spec, operand, made)
    elif spec.kind in ("AdamW", "Adam"):
        _adam(graph, spec, operand, made)
    else:
        raise UnsupportedError(f"no update graph for optimizer {spec.kind!r}", remedy='Use kind="AdamW", "Adam" or "SGD".')


def _adam(graph: Fragment, spec: OptimizerSpec, operand: Operand, made: list[str]) -> None:
    gradient, scalars = operand.gradient, operand.scalars
    if spec.kind == "Adam" and spec.weight_decay:
        gradient = graph("Add", gradient, graph("Mul", operand.parameter, graph.constant(spec.weight_decay, scalars.dtype)))
    beta1, beta2 = spec.betas
    kept = graph("Mul", operand.moments[0], graph.constant(beta1, scalars.dtype))
    first = graph("Add", kept, graph("Mul", gradient, graph.constant(1 - beta1, scalars.dtype)), name=made[1])
    kept = graph("Mul", operand.moments[1], graph.constant(beta2, scalars.dtype))
    square = graph("Mul", graph("Mul", gradient, gradient), graph.constant(1 - beta2, scalars.dtype))
    second = graph("Add", kept, square, name=made[2])
    change = graph("Div", first, graph("Add", graph("Mul", graph("Sqrt", second), scalars.factor), scalars.offset))
    if scalars.decay is None:
        graph("Sub", operand.parameter, change, name=made[0])
    elif spec.adam_mode == 1:  # ORT's default decays after the update
        graph("Mul", graph("Sub", operand.parameter, change), scalars.decay, name=made[0])
    else:
        graph("Sub", graph("Mul", operand.parameter, scalars.decay), change, name=made[0])


def _sgd(graph: Fragment, spec: OptimizerSpec, operand: Operand, made: list[str]) -> None:
    gradient, scalars = operand.gradient, operand.scalars
    if spec.weight_decay:
        gradient = graph("Add", gradient, graph("Mul", operand.parameter, graph.constant(spec.weight_decay, scalars.dtype)))
    if spec.momentum:
        kept = graph("Mul", operand.moments[0], graph.constant(spec.momentum, scalars.dtype))
        buffer = graph("Add", kept, gradient, name=made[1])
        gradient = graph("Add", gradient, graph("Mul", buffer, graph.constant(spec.momentum, scalars.dtype))) if spec.nesterov else buffer
    graph("Sub", operand.parameter, graph("Mul", gradient, scalars.rate), name=made[0])


def clipped(
    graph: Fragment,
    gradients: Mapping[str, str],
    max_norm: float,
    names: Mapping[str, str] | None = None,
    types: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """The gradients, scaled so that their common norm is at most `max_norm`, as ORT's InplaceClipGradNorm does.

    `names` are those of the results, by parameter; by default new ones. `types` are the element types that are not float32.
    """
    types = {name: (types or {}).get(name, TensorProto.FLOAT) for name in gradients}
    kind = max(types.values())  # DOUBLE, if any parameter is
    dtype = helper.tensor_dtype_to_np_dtype(kind)

    def cast(value: str, source: int, target: int) -> str:
        return value if source == target else graph("Cast", value, to=target)

    squares = [cast(graph("ReduceSumSquare", value, keepdims=0), types[name], kind) for name, value in gradients.items()]
    norm = graph("Sqrt", graph("Sum", *squares))
    ratio = graph("Div", graph.constant(max_norm, dtype), graph("Add", norm, graph.constant(1e-6, dtype)))
    ratio = graph("Min", ratio, graph.constant(1.0, dtype))
    ratios = {element: cast(ratio, kind, element) for element in set(types.values())}
    return {name: graph("Mul", value, ratios[types[name]], name=names[name] if names else None) for name, value in gradients.items()}


def _join(graph: Fragment, values: list[str], shapes: list[tuple[int, ...]]) -> str:
    """The values' elements as one vector."""
    flat = [
        value if len(shape) == 1 else graph("Reshape", value, _shape(graph, (-1,))) for value, shape in zip(values, shapes, strict=True)
    ]
    return graph("Concat", *flat, axis=0)


def _part(graph: Fragment, vector: str, states: list[str], shapes: list[tuple[int, ...]]) -> None:
    """The vector's parts as `<state>.new`, in the states' shapes."""
    sizes = graph.constant([math.prod(shape) for shape in shapes], np.int64)
    flat = [f"{state}{NEW}" if len(shape) == 1 else graph.fresh("part") for state, shape in zip(states, shapes, strict=True)]
    graph.several("Split", [vector, sizes], flat, axis=0)
    for part, state, shape in zip(flat, states, shapes, strict=True):
        if len(shape) != 1:
            graph("Reshape", part, _shape(graph, shape), name=f"{state}{NEW}")


def _shape(graph: Fragment, shape: tuple[int, ...]) -> str:
    return graph.constant(shape, np.int64)
