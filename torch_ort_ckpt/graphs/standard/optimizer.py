"""An optimizer graph of standard operators, on flat tensors whose memory it may overwrite: what `OrtOptimizer` runs in a stock build.

Inputs are vectors of float32: parameters (`p0`, ...), their gradients (`g0`, ...) and moments (`p0.momentum0`, ...), and a few scalars that
the host computes from rate and step. The output `X.new` may be bound to the memory of `X`: every node that reads `X` comes before the one
that writes `X.new`, or is that node, and then it works element by element.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto, helper

from ...checkpoint.state import OptimizerSpec
from .fragment import Fragment
from .update import JOINED, NEW, add_update, clipped, moments_of, scalar_names

_OPSET, _IR_VERSION = 15, 8
"""Old ones, which every release loads."""


def update_model(spec: OptimizerSpec, sizes: Sequence[int], joined: int = JOINED) -> onnx.ModelProto:
    """The graph for tensors of so many elements. With clipping, the gradients are overwritten too (`g0.new`)."""
    shapes = {f"p{index}": (size,) for index, size in enumerate(sizes)}
    gradients = {f"p{index}": f"g{index}" for index in range(len(sizes))}
    states = {state: shapes[name] for name in shapes for state in (name, *(f"{name}.{kind}" for kind in moments_of(spec)))}
    given = {gradients[name]: shape for name, shape in shapes.items()}
    results = {f"{state}{NEW}": shape for state, shape in states.items()}
    scalars = scalar_names(spec)
    unused = {scalars.rate} if spec.kind != "SGD" else set()
    inputs: dict[str, tuple[int, ...]] = {name: () for name in scalars.names if name not in unused}
    inputs |= states | given
    graph = Fragment({*inputs, *results})
    plain = dataclasses.replace(spec, max_norm=None)
    if spec.max_norm is not None:
        written = {name: f"{gradient}{NEW}" for name, gradient in gradients.items()}
        gradients = clipped(graph, gradients, spec.max_norm, written)
        results |= {written[name]: shape for name, shape in shapes.items()}
    add_update(graph, plain, shapes, gradients, joined=joined, scalars=scalars)
    made = helper.make_graph(graph.nodes, "update", _values(inputs), _values(results), graph.constants)
    opsets = [helper.make_opsetid("", _OPSET)]
    return helper.make_model(made, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="torch_ort_ckpt")


def _values(shapes: Mapping[str, tuple[int, ...]]) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
