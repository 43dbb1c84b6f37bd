"""The gradient of a Split of which a part is not used.

ORT's gradient builder joins the gradients of those parts that have one: the result is too short. Zeros of the right shape go in between.
"""

from __future__ import annotations

import onnx
from onnx import helper

from ..description import attributes
from .rewriting import NewNodes, replace_nodes


def complete_split_gradients(model: onnx.ModelProto) -> int:
    graph = model.graph
    splits = {f"{part}_grad": node for node in graph.node if node.op_type == "Split" for part in node.output if part}
    types = {value.name: value.type.tensor_type.elem_type for value in [*graph.value_info, *graph.input]}

    def rewrite(node: onnx.NodeProto) -> NewNodes | None:
        split = splits.get(node.input[0]) if node.op_type == "Concat" and node.input else None
        if split is None or len(node.input) == len(split.output):
            return None
        expected = [f"{part}_grad" for part in split.output]
        if [name for name in expected if name in set(node.input)] != list(node.input):
            return None
        if attributes(node).get("axis") != attributes(split).get("axis", 0):
            return None
        return _completed(node, split, expected, types.get(split.input[0]) or onnx.TensorProto.FLOAT)

    return replace_nodes(model, rewrite)


def _completed(node: onnx.NodeProto, split: onnx.NodeProto, expected: list[str], element_type: int) -> NewNodes:
    new = NewNodes(f"{node.output[0]}.completed")
    inputs = []
    for place, name in enumerate(expected):
        if name not in node.input:
            split.output[place] = split.output[place] or f"{new.prefix}.part{place}"
            zero = helper.make_tensor("zero", element_type, [1], [0])
            name = new.add("ConstantOfShape", new.add("Shape", split.output[place]), value=zero)
        inputs.append(name)
    new.add("Concat", *inputs, output=node.output[0], axis=attributes(node)["axis"])
    return new
