"""Gradient graphs made by PyTorch: the stages of this folder in their order. Needs no onnxruntime."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch import nn
from torch.export.graph_signature import OutputKind

from ...errors import CheckpointError
from .capture import Dynamic, capture, freeze_unused, grown, in_training_mode, run_once
from .contract import JointGraph
from .evaluation import evaluation_program
from .joint import JointProgram, input_roles, joint
from .label_range import describe_labels
from .losses import find_loss
from .shape_check import check_captured
from .trainable import trainable_names
from .translate import Names, keep_outputs, public_name, translate
from .with_loss import LOSS, Example, WithLoss, complete_targets, named_example, output_names, tensors

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gradients:
    """What PyTorch made of a module and its loss: the joint graph as ONNX, the program before translation, and the eval graph."""

    graph: JointGraph
    program: JointProgram
    evaluation: onnx.ModelProto | None
    trainable: list[str]
    states: dict[str, torch.Tensor]
    """Parameters and persistent buffers, the loss's too, with the values that they have in the module."""


def build(
    module: nn.Module,
    example_inputs: Any,
    loss: Any,
    *,
    example_targets: Any = None,
    class_axis: int | None = None,
    frozen: Iterable[str] = (),
    extra_outputs: bool | Sequence[str] = False,
    dynamic_shapes: Dynamic | None = None,
    opset: int | None = None,
    optimize: bool = True,
    evaluation: bool = True,
    tell: Callable[[str], None] = _log.info,
) -> Gradients:
    """The joint graph of a module and its loss, and with `evaluation` the eval graph; the module is left as it is."""
    chosen = find_loss(loss, class_axis)
    example = named_example(module, example_inputs, example_targets, chosen)
    twin = in_training_mode(module)
    trainable = set(trainable_names(twin, frozen))
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(name in trainable)
    wrapped = WithLoss(twin, chosen, example)
    result = run_once(wrapped, example)
    example = complete_targets(wrapped, example, chosen, result)
    wrapped = WithLoss(twin, chosen, example)
    names, extras = _outputs(list(tensors(result)), extra_outputs, loss is None)
    dynamic, required = _dynamic(example, wrapped.names, dynamic_shapes)
    values = grown({**example.tensors, **example.targets}, dynamic)
    ordered = [values[name].detach().cpu() for name in wrapped.names]
    wrapped.outputs = extras
    if unused := [public_name(name) for name in freeze_unused(wrapped, ordered)]:
        _log.info("frozen, because the loss does not depend on them: %s", ", ".join(unused))
        tell(f"frozen, because the loss does not depend on them: {', '.join(unused)}")
    tell("capturing the module")
    captured = dataclasses.replace(capture(wrapped, ordered, dynamic), required=required)
    sizes = check_captured(captured, dynamic, required)
    tell("building the gradient graph")
    program = joint(captured, optimize=optimize)
    tell("translating it to ONNX")
    graph = _joint_graph(program, [names[place] for place in extras], sizes, opset, optimize)
    evaluated = None
    if evaluation:
        tell("exporting the eval graph")
        evaluated = _evaluation(wrapped, ordered, dynamic, names, extras, opset, loss is None)
    describe_labels(captured.program, captured.inputs, graph.model, *([evaluated] if evaluated is not None else []))
    return Gradients(graph, program, evaluated, list(graph.gradients), _states(wrapped, module))


def _outputs(found: Sequence[torch.Tensor], wanted: bool | Sequence[str], has_loss: bool) -> tuple[list[str], list[int]]:
    """The names of the module's outputs, and the places of those that the graph returns after the loss."""
    names = output_names(len(found))
    possible = names[1:] if has_loss else names
    if wanted is True:
        return names, [names.index(name) for name in possible]
    chosen = [wanted] if isinstance(wanted, str) else list(wanted or ())
    if unknown := [name for name in chosen if name not in possible]:
        raise CheckpointError(f"the module has no output {unknown[0]!r}", remedy=f"It has: {', '.join(possible)}.")
    return names, [names.index(name) for name in chosen]


def _dynamic(example: Example, names: Sequence[str], asked: Dynamic | None) -> tuple[dict[str, dict[int, str]], dict[str, dict[int, str]]]:
    """Input -> axis -> name for the sizes to leave open, and for those of them that must come out open.

    By default that is the first axis, called `batch`, of every input. The targets follow the module's output.
    """
    values = {**example.targets, **example.tensors}
    if asked is not None:
        for name, axes in asked.items():
            if name not in values:
                raise CheckpointError(f"no input {name!r}", field="dynamic_shapes", remedy=f"There are: {', '.join(names)}.")
            if bad := [axis for axis in axes if not -values[name].dim() <= axis < values[name].dim()]:
                raise CheckpointError(f"input {name!r} has no axis {bad[0]}", field="dynamic_shapes")
        asked = {name: {axis % values[name].dim(): text for axis, text in axes.items()} for name, axes in asked.items()}
        dynamic = {name: dict(axes) for name, axes in asked.items()}
        required = {name: dict(axes) for name, axes in asked.items()}
        if not any(dynamic.values()):
            return {}, {}
    else:
        first = next((value for value in example.tensors.values() if value.dim()), None)
        size = first.shape[0] if first is not None else None
        dynamic = {
            name: {0: "batch" if value.shape[0] == size else f"{name}_axis0"} for name, value in example.tensors.items() if value.dim()
        }
        required = {name: axes for name, axes in dynamic.items() if example.tensors[name] is first}
    for name, value in example.targets.items():
        if name not in dynamic:
            dynamic[name] = {axis: f"{name}_axis{axis}" for axis in range(value.dim())}
    return dynamic, required


def _joint_graph(program: JointProgram, extras: Sequence[str], sizes: Mapping[str, str], opset: int | None, optimize: bool) -> JointGraph:
    rest = iter(extras)
    outputs: dict[str, list[tuple[str, str]]] = {"loss": [], "output": [], "gradient": [], "update": []}
    names = []
    for role in program.outputs:
        name = public_name(role.name)
        text = {"loss": "loss", "output": "", "gradient": f"{name}_grad", "update": f"{name}.updated"}[role.kind] or next(rest)
        outputs[role.kind].append((name, text))
        names.append(text)
    model = translate(program.program, Names(program.inputs, names, sizes), opset, program.captured.program, optimize=optimize)
    order = ["loss", *extras, *(text for kind in ("gradient", "update") for _, text in outputs[kind])]
    keep_outputs(model, order)
    return JointGraph(
        model,
        [role.name for role in program.inputs if role.kind == "input"],
        "loss",
        list(extras),
        dict(outputs["gradient"]),
        dict(outputs["update"]),
    )


def _evaluation(
    wrapped: WithLoss,
    values: Sequence[torch.Tensor],
    dynamic: Dynamic,
    names: Sequence[str],
    extras: Sequence[int],
    opset: int | None,
    own: bool,
) -> onnx.ModelProto:
    """The eval graph: the loss, then the extra outputs. The module's other outputs are values in it, for `export_inference`."""
    wrapped.eval()
    wrapped.outputs = list(range(1 if own else 0, len(names)))
    captured, program = evaluation_program(wrapped, values, dynamic)
    sizes = check_captured(captured, dynamic, {})
    users = iter(["loss", *(names[place] for place in wrapped.outputs)])
    # A module may change buffers in eval mode too; the eval graph leaves that out.
    texts = [
        next(users) if spec.kind is OutputKind.USER_OUTPUT else f"{spec.target}.updated" for spec in program.graph_signature.output_specs
    ]
    model = translate(program, Names(input_roles(program, captured.inputs), texts, sizes), opset, captured.program)
    keep_outputs(model, ["loss", *(names[place] for place in extras)])
    model.graph.name = "evaluation"
    return model


def _states(wrapped: WithLoss, module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer under its public name."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters())
    persistent = {name for name in module.state_dict() if name not in found}
    found |= {name: value for name, value in module.named_buffers() if name in persistent}
    if wrapped.loss is not None:
        found |= {f"{LOSS}{name}": value for name, value in wrapped.loss.named_parameters()}
        found |= {f"{LOSS}{name}": value for name, value in wrapped.loss.named_buffers()}
    return {name: value.detach().cpu() for name, value in found.items()}
