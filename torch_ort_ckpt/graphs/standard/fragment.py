"""A piece of a graph under construction: nodes and constants, with names that nothing else in the graph has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


class Fragment:
    """Nodes in execution order, and the constants they use. `taken` are the names of the graph that it will be a part of."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._taken = set(taken)
        self._known: dict[tuple[str, bytes, tuple[int, ...]], str] = {}

    def __call__(self, operator: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Add a node with one output; returns the output's name."""
        return self.several(operator, inputs, [name or self.fresh(operator)], **attributes)[0]

    def several(self, operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> list[str]:
        """Add a node with several outputs of the given names."""
        self.nodes.append(helper.make_node(operator, list(inputs), list(outputs), name=self.fresh(f"{operator}_node"), **attributes))
        return list(outputs)

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """The name of a constant with this value; equal constants are stored once."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.tobytes(), array.shape)
        if key not in self._known:
            self._known[key] = self.fresh("constant")
            self.constants.append(numpy_helper.from_array(array, self._known[key]))
        return self._known[key]

    def inside(self) -> Fragment:
        """An empty fragment for the body of a branch: its names are unlike those of the graph around it."""
        body = Fragment()
        body._taken = self._taken
        return body

    def branch(self, condition: str, then: Fragment, other: Fragment, outputs: Mapping[str, tuple[int, tuple[int, ...]]]) -> None:
        """Compute the outputs (name -> element type, shape) by one body or the other; both compute values of these names."""
        bodies = []
        for body, suffix in ((then, "then"), (other, "else")):
            inner = {name: f"{name}/{suffix}" for name in outputs}
            for node in body.nodes:
                node.output[:] = [inner.get(name, name) for name in node.output]
                node.input[:] = [inner.get(name, name) for name in node.input]
            values = [helper.make_tensor_value_info(inner[name], kind, shape) for name, (kind, shape) in outputs.items()]
            bodies.append(helper.make_graph(body.nodes, suffix, [], values, body.constants))
        self.several("If", [condition], list(outputs), then_branch=bodies[0], else_branch=bodies[1])

    def fresh(self, stem: str) -> str:
        """A name that is not in use yet."""
        number, stem = 0, f"step/{stem}"
        while (name := f"{stem}_{number}" if number else stem) in self._taken:
            number += 1
        self._taken.add(name)
        return name
