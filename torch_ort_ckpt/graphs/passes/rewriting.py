"""What passes share: new nodes and constants with names of their own, and putting them in the place of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


@dataclass
class NewNodes:
    """Nodes and constants that a pass adds to a graph. Their names start with `prefix`, which must be unique in the graph."""

    prefix: str
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def add(self, op_type: str, *inputs: str, output: str | None = None, **settings: Any) -> str:
        """Add a node with one output and return the output's name."""
        output = output or f"{self.prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [output], **settings))
        return output

    def add_several(self, op_type: str, inputs: Iterable[str], outputs: Iterable[str], **settings: Any) -> None:
        self.nodes.append(helper.make_node(op_type, list(inputs), list(outputs), **settings))

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """Add an initializer and return its name."""
        return self._constant(numpy_helper.from_array(np.array(value, dtype, order="C")))

    def scalar(self, value: float, element_type: int) -> str:
        """As `constant`, for an ONNX element type: numpy has no bfloat16."""
        return self._constant(helper.make_tensor("", element_type, [], [value]))

    def _constant(self, tensor: onnx.TensorProto) -> str:
        tensor.name = f"{self.prefix}.constant{len(self.constants)}"
        self.constants.append(tensor)
        return str(tensor.name)


def replace_nodes(model: onnx.ModelProto, rewrite: Callable[[onnx.NodeProto], NewNodes | None]) -> int:
    """Call `rewrite` with every node of the graph and put the nodes that it returns in the node's place; None keeps the node.

    Returns how many nodes were replaced. Nodes inside If / Loop bodies are left alone.
    """
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []
    count = 0
    for node in model.graph.node:
        new = rewrite(node)
        if new is None:
            nodes.append(node)
            continue
        nodes += new.nodes
        constants += new.constants
        count += 1
    if count:
        set_items(model.graph.node, nodes)
        model.graph.initializer.extend(constants)
    return count


def set_items(items: Any, values: Iterable[Any]) -> None:
    """Replace the messages of a repeated protobuf field. `values` may be among those it holds."""
    values = list(values)
    del items[:]
    items.extend(values)
