"""Losses whose labels the graph computes itself (a language model shifts them), so that they can't be checked before a run.

ONNX Runtime's loss kernels use a label as an index without a bounds check. Added nodes replace a label out of range by 0 and report it in
two more outputs, so that the run can be refused.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import TensorProto, helper, numpy_helper

from ..description import attributes
from .rewriting import NewNodes, replace_nodes

LOSSES = frozenset(f"{kind}Loss{internal}" for kind in ("SoftmaxCrossEntropy", "NegativeLogLikelihood") for internal in ("", "Internal"))
_GRADIENTS = frozenset(f"{name}Grad" for name in LOSSES)


def guard_labels(model: onnx.ModelProto, losses: Collection[str]) -> int:
    """`losses`: the first outputs of the loss nodes to guard."""
    safe: dict[str, str] = {}

    def rewrite(node: onnx.NodeProto) -> NewNodes | None:
        if node.op_type in _GRADIENTS and node.input[2] in safe:
            node.input[2] = safe[node.input[2]]
        if node.op_type not in LOSSES or node.output[0] not in losses:
            return None
        labels, right = guard_outputs([node.output[0]])
        new = NewNodes(f"{labels}.part")
        zero = new.constant(0)
        new.add("Cast", node.input[1], output=labels, to=TensorProto.INT64)
        classes = new.add("Gather", new.add("Shape", node.input[0]), new.constant(1))
        limits = new.add("Not", new.add("Less", labels, zero)), new.add("Less", labels, classes)
        ignored = ignored_label(model, node)
        if ignored is None:
            new.add("And", *limits, output=right)
        else:
            left_out = new.constant(ignored) if isinstance(ignored, int) else new.add("Cast", ignored, to=TensorProto.INT64)
            new.add("Or", new.add("And", *limits), new.add("Equal", labels, left_out), output=right)
        result = new.add("Where", right, labels, zero)
        safe.setdefault(node.input[1], result)
        node.input[1] = result
        new.nodes.append(node)
        return new

    count = replace_nodes(model, rewrite)
    for name, kind in zip(guard_outputs(losses), [TensorProto.INT64, TensorProto.BOOL] * len(losses), strict=True):
        model.graph.output.append(helper.make_tensor_value_info(name, kind, None))
    return count


def guard_outputs(losses: Collection[str]) -> list[str]:
    """The outputs that `guard_labels` adds: for each loss the labels, and whether each of them is in range."""
    return [name for loss in losses for name in (f"{loss}.labels", f"{loss}.labels_in_range")]


def ignored_label(model: onnx.ModelProto, node: onnx.NodeProto) -> int | str | None:
    """The label that a loss ignores: an attribute, or an input (its value if that is a constant, else its name)."""
    if len(node.input) > 3 and node.input[3]:
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        constants |= {other.output[0]: attributes(other).get("value") for other in model.graph.node if other.op_type == "Constant"}
        tensor = constants.get(node.input[3])
        return int(numpy_helper.to_array(tensor).reshape(-1)[0]) if tensor is not None else node.input[3]
    value = attributes(node).get("ignore_index")
    return int(value) if value is not None else None
