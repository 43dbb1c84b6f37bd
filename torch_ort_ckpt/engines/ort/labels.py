"""Labels out of range. ONNX Runtime's loss kernels use a label as an index without a bounds check.

Labels that are an input of the graph are checked against the number of classes before a run. Where the graph computes them (a language
model shifts them), `label_guards` adds nodes that report a label out of range, so that the run can be refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx
import torch

from ...errors import CheckpointError
from ...graphs.description import TensorSpec, copy_of, read_labels, spec_of
from ...graphs.passes.label_guards import LOSSES, guard_labels, guard_outputs, ignored_label
from ...graphs.shapes import typed_values
from .. import Tensors

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


def check_labels(model: onnx.ModelProto, inputs: Sequence[TensorSpec]) -> LabelChecks:
    """What to check in each run. A model that computes its labels itself is changed (in place)."""
    losses = [node for node in model.graph.node if node.op_type in LOSSES]
    if not losses:
        return LabelChecks(recorded_labels(model, inputs), [])
    places = {spec.name: place for place, spec in enumerate(inputs) if spec.dtype in (torch.int32, torch.int64)}
    producers = {name: node for node in model.graph.node for name in node.output}
    classes = _class_counts(model, [node.input[0] for node in losses])
    given, inside = [], []
    for node in losses:
        source, count = node.input[1], classes.get(node.input[0])
        while source in producers and producers[source].op_type in _KEEP_EVERY_LABEL:
            source = producers[source].input[0]
        ignored = ignored_label(model, node)
        if source in places and count is not None and isinstance(ignored, int | None):
            given.append(GivenLabels(places[source], source, count, ignored))
        else:
            inside.append(node)
    guarded = [node.output[0] for node in inside]
    if guarded:
        guard_labels(model, guarded)
    return LabelChecks(given, guard_outputs(guarded))


def given_labels(model: onnx.ModelProto, inputs: Sequence[TensorSpec]) -> LabelChecks:
    """What to check before each run, for a graph that is not run itself. Standard operators check the indices that a graph computes."""
    return LabelChecks(check_labels(copy_of(model), inputs).given, [])


def recorded_labels(model: onnx.ModelProto, inputs: Sequence[TensorSpec]) -> list[GivenLabels]:
    """The labels that the graph's metadata describe: its own nodes no longer show what they are."""
    recorded = read_labels(model)
    return [GivenLabels(place, spec.name, *recorded[spec.name]) for place, spec in enumerate(inputs) if spec.name in recorded]


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
