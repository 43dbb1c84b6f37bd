"""Labels out of range. ONNX Runtime's loss kernels use a label as an index without a bounds check.

Labels that are an input of the graph are checked against the number of classes before a run. Where the graph computes them (a language
model shifts them), added nodes replace a label out of range by 0 and report it, so that the run can be refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper

from ...errors import CheckpointError
from ...graphs.description import TensorSpec, attributes, spec_of
from ...graphs.passes.forward import typed_values
from .. import Tensors

_LOSSES = frozenset(f"{kind}Loss{internal}" for kind in ("SoftmaxCrossEntropy", "NegativeLogLikelihood") for internal in ("", "Internal"))
_GRADIENTS = frozenset(f"{name}Grad" for name in _LOSSES)
_KEEP_EVERY_LABEL = frozenset({"Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"})


@dataclass(frozen=True)
class GivenLabels:
    """Labels that are an input: its place, and what it may hold."""

    place: int
    name: str
    classes: int
    ignored: int | None

    def check(self, inputs: Tensors) -> None:
        labels = inputs[self.place]
        if labels.device.type != "cpu":  # checking them would need a device sync
            return
        low, high = torch.aminmax(labels)
        if low.item() < 0 or high.item() >= self.classes:
            wrong = (labels < 0) | (labels >= self.classes)
            if self.ignored is not None:
                wrong &= labels != self.ignored
            if bool(wrong.any()):
                raise out_of_range(int(labels[wrong][0]), self.classes, self.name)


@dataclass(frozen=True)
class LabelChecks:
    """Labels to check before a run, and pairs of outputs to check after it: labels, and whether each is in range."""

    given: list[GivenLabels]
    reported: list[str]

    def before(self, inputs: Tensors) -> None:
        for labels in self.given:
            labels.check(inputs)

    def after(self, outputs: Sequence[torch.Tensor]) -> None:
        for labels, right in zip(outputs[::2], outputs[1::2], strict=True):
            if not bool(right.all()):
                raise out_of_range(int(labels[~right][0]), None, None)


NO_CHECKS = LabelChecks([], [])


def out_of_range(label: int, classes: int | None, field: str | None) -> CheckpointError:
    known = f": there are {classes} classes, counted from 0" if classes is not None else " of the loss"
    return CheckpointError(
        f"label {label} is out of range{known}",
        field=field,
        remedy="Correct the labels. Ignored labels need a loss with ignore_index.",
    )


def check_labels(model: onnx.ModelProto, inputs: Sequence[TensorSpec]) -> tuple[onnx.ModelProto, LabelChecks]:
    """The model, changed if it computes its labels itself, and what to check in each run."""
    losses = [node for node in model.graph.node if node.op_type in _LOSSES]
    if not losses:
        return model, NO_CHECKS
    places = {spec.name: place for place, spec in enumerate(inputs) if spec.dtype in (torch.int32, torch.int64)}
    producers = {name: node for node in model.graph.node for name in node.output}
    classes = _class_counts(model, [node.input[0] for node in losses])
    given, inside = [], []
    for node in losses:
        source, count = node.input[1], classes.get(node.input[0])
        while source in producers and producers[source].op_type in _KEEP_EVERY_LABEL:
            source = producers[source].input[0]
        ignored = _ignored(model, node)
        if source in places and count is not None and isinstance(ignored, int | None):
            given.append(GivenLabels(places[source], source, count, ignored))
        else:
            inside.append(node)
    if not inside:
        return model, LabelChecks(given, [])
    return _with_guards(model, [node.output[0] for node in inside], given)


def _class_counts(model: onnx.ModelProto, scores: Iterable[str]) -> dict[str, int]:
    """The size of axis 1 of these values, where it is known."""

    def known(values: Iterable[onnx.ValueInfoProto]) -> dict[str, int]:
        shapes = {value.name: spec_of(value).shape for value in values}
        return {name: shape[1] for name, shape in shapes.items() if shape is not None and len(shape) > 1 and isinstance(shape[1], int)}

    graph = model.graph
    counts = known([*graph.value_info, *graph.output, *graph.input])
    if all(name in counts for name in scores):
        return counts
    try:
        return known(typed_values(model)) | counts
    except Exception:  # shape inference may raise anything; the graph is then checked at each run
        return counts


def _ignored(model: onnx.ModelProto, node: onnx.NodeProto) -> int | str | None:
    """The ignored label: an attribute, or an input (its value if that is a constant, else its name)."""
    if len(node.input) > 3 and node.input[3]:
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        constants |= {other.output[0]: attributes(other).get("value") for other in model.graph.node if other.op_type == "Constant"}
        tensor = constants.get(node.input[3])
        return int(onnx.numpy_helper.to_array(tensor).reshape(-1)[0]) if tensor is not None else node.input[3]
    value = attributes(node).get("ignore_index")
    return int(value) if value is not None else None


def _with_guards(model: onnx.ModelProto, guarded: list[str], given: list[GivenLabels]) -> tuple[onnx.ModelProto, LabelChecks]:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    safe: dict[str, str] = {}
    reported: list[str] = []
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type in _LOSSES and node.output[0] in guarded:
            added, labels, right, result = _guard(model, node)
            nodes += added
            safe.setdefault(node.input[1], result)
            node.input[1] = result
            reported += [labels, right]
        elif node.op_type in _GRADIENTS and node.input[2] in safe:
            node.input[2] = safe[node.input[2]]
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    kinds = [TensorProto.INT64, TensorProto.BOOL] * (len(reported) // 2)
    graph.output.extend(helper.make_tensor_value_info(name, kind, None) for name, kind in zip(reported, kinds, strict=True))
    return changed, LabelChecks(given, reported)


def _guard(model: onnx.ModelProto, node: onnx.NodeProto) -> tuple[list[onnx.NodeProto], str, str, str]:
    """Nodes that compute the labels as int64, whether each is in range, and the labels with 0 in place of those that are not."""
    nodes: list[onnx.NodeProto] = []
    prefix = f"{node.output[0]}.labels"

    def add(kind: str, *inputs: str, **settings: Any) -> str:
        output = f"{prefix}.{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [output], **settings))
        return output

    def constant(value: int) -> str:
        return add("Constant", value=helper.make_tensor("value", TensorProto.INT64, [], [value]))

    labels, zero = add("Cast", node.input[1], to=TensorProto.INT64), constant(0)
    classes = add("Gather", add("Shape", node.input[0]), constant(1))
    right = add("And", add("Not", add("Less", labels, zero)), add("Less", labels, classes))
    ignored = _ignored(model, node)
    if ignored is not None:
        left_out = constant(ignored) if isinstance(ignored, int) else add("Cast", ignored, to=TensorProto.INT64)
        right = add("Or", right, add("Equal", labels, left_out))
    return nodes, labels, right, add("Where", right, labels, zero)
