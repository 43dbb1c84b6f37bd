"""A training graph cut into pipeline stages for `torch.distributed.pipelining`, each with its own parameters and checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch import nn

from ..checkpoint.bridge import from_torch
from ..checkpoint.state import CheckpointState, is_string
from ..errors import MissingFileError, UnsupportedError
from ..graphs.artifacts import Artifacts
from ..graphs.translation.translate import Translation, slice_graph, translate
from ..storage.paths import PathLike
from .scopes import Scope, compute_values, lookup, place, set_own_attribute


@dataclass(frozen=True)
class Pipeline:
    """`stages` in order, each a module from one tensor to the next; `loss(prediction, *targets)` follows the last."""

    stages: list[Stage]
    loss: Loss


def pipeline_stages(artifacts: Artifacts | PathLike, count: int, *, targets: Sequence[str] | None = None) -> Pipeline:
    """Cut the forward part of the training graph into `count` stages of about equally many parameters.

    `targets` are the inputs that only the loss reads (default: the last one). A graph can be cut where a single tensor passes."""
    found = artifacts if isinstance(artifacts, Artifacts) else Artifacts.load(artifacts)
    if found.training is None:
        raise MissingFileError("no training_model.onnx", path=found.folder)
    found.state.require_values()
    names = [spec.name for spec in found.inputs]
    only_loss = list(targets) if targets is not None else names[-1:]
    plan = _Plan(found.training, found, [name for name in names if name not in only_loss], only_loss)
    borders = [*plan.cuts(count), plan.prediction]
    stages, entry = [], plan.inputs
    for border in borders:
        stages.append(Stage(translate(found.training, parameters=found.parameters, inputs=entry, outputs=[border]), found.state))
        entry = [border]
    loss = translate(found.training, parameters=found.parameters, inputs=[plan.prediction, *only_loss], outputs=[found.loss])
    return Pipeline(stages, Loss(loss, found.state))


class Stage(nn.Module):
    """One piece of the graph; its parameters have the names of the checkpoint."""

    def __init__(self, translation: Translation, state: CheckpointState) -> None:
        super().__init__()
        self.graph = translation.module
        self.names = translation.parameters
        self._hooked: list[Scope] = []
        for name in self.names:
            value: Any = state.parameters[name]
            owner, key = place(self, name, self._hooked)
            if name in state.trainable:
                owner._parameters[key] = nn.Parameter(value.detach().clone())
            else:
                owner._buffers[key] = value.detach().clone()

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        compute_values(self._hooked)
        outputs: tuple[torch.Tensor, ...] = self._modules["graph"](*inputs, *self.tensors().values())  # type: ignore[misc]  # not None
        return outputs[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by their names in the checkpoint."""
        return {name: lookup(*place(self, name, self._hooked)) for name in self.names}

    def __setattr__(self, name: str, value: Any) -> None:
        if not set_own_attribute(self, name, value):
            super().__setattr__(name, value)

    def checkpoint(self, optimizer: torch.optim.Optimizer | None = None) -> CheckpointState:
        """This stage's part of the training state; the states of all stages merge into the checkpoint of the whole model."""
        return from_torch(self, optimizer)


class Loss(nn.Module):
    """From the prediction and the targets to the loss; it has no trainable parameters."""

    def __init__(self, translation: Translation, state: CheckpointState) -> None:
        super().__init__()
        if learned := [name for name in translation.parameters if name in state.trainable]:
            raise UnsupportedError("the loss has trainable parameters, so it would have to be a stage", field=learned[0])
        self.graph = translation.module
        self._constants = [value for name in translation.parameters if not is_string(value := state.parameters[name])]

    def forward(self, prediction: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        outputs: tuple[torch.Tensor, ...] = self.graph(prediction, *targets, *self._constants)
        return outputs[0]


class _Plan:
    """Where the forward part can be cut."""

    def __init__(self, model: onnx.ModelProto, artifacts: Artifacts, inputs: list[str], targets: list[str]) -> None:
        self.artifacts, self.inputs = artifacts, inputs
        nodes, _ = slice_graph(model.graph, [artifacts.loss])
        on_targets, on_inputs = set(targets), set(inputs)
        self.body: list[onnx.NodeProto] = []
        entering: dict[str, None] = {}
        for node in nodes:
            if on_targets.intersection(node.input):
                on_targets.update(node.output)
                entering.update(dict.fromkeys(name for name in node.input if name in on_inputs and name not in on_targets))
            else:
                self.body.append(node)
                if on_inputs.intersection(node.input):
                    on_inputs.update(node.output)
        if len(entering) != 1:
            raise UnsupportedError(
                f"{len(entering)} values of the model enter the loss", path=artifacts.training_path, remedy="Name `targets`."
            )
        (self.prediction,) = entering
        self.activations = on_inputs
        # Nodes that don't lead to the prediction belong to the loss.
        self.body, _ = slice_graph(onnx.GraphProto(node=self.body), [self.prediction])
        self.body, self.uses = self._uses()

    def _uses(self) -> tuple[list[onnx.NodeProto], list[set[str]]]:
        """The nodes on the path of the data, and the parameters each uses, directly or through others (a transposed weight)."""
        behind: dict[str, set[str]] = {name: {name} for name in self.artifacts.parameters}
        nodes, uses = [], []
        for node in self.body:
            used = set().union(*(behind.get(name, set()) for name in node.input))
            if self.activations.intersection(node.output):
                nodes.append(node)
                uses.append(used)
            else:
                behind.update(dict.fromkeys(node.output, used))
        return nodes, uses

    def cuts(self, count: int) -> list[str]:
        """`count - 1` values to cut at, so that the stages have about equally many parameter elements."""
        sizes = self._elements()
        places = self._single_tensors()
        total, chosen = sum(sizes), []
        start = 0
        for number in range(1, count):
            open_places = [place for place in places if place > start and (place < len(self.body) - 1)]
            if len(open_places) < count - number:
                raise UnsupportedError(
                    f"the graph can't be cut into {count} stages: too few places where a single tensor passes",
                    path=self.artifacts.training_path,
                    remedy="Export it with fixed dimensions, or use fewer stages.",
                )
            start = min(open_places, key=lambda place: abs(sum(sizes[: place + 1]) - total * number / count))
            chosen.append(places[start])
        return chosen

    def _elements(self) -> list[int]:
        """Per node, how many parameter elements it is the first to use."""
        seen: set[str] = set()
        sizes = []
        for used in self.uses:
            values: list[Any] = [self.artifacts.state.parameters[name] for name in used - seen]
            sizes.append(sum(int(value.numel()) for value in values if not is_string(value)))
            seen |= used
        return sizes

    def _single_tensors(self) -> dict[int, str]:
        """Position -> the only value passed from the nodes up to it to those after, with no parameter used on both sides."""
        last_use: dict[str, int] = {self.prediction: len(self.body)}
        for position, (node, used) in enumerate(zip(self.body, self.uses, strict=True)):
            last_use.update({name: max(position, last_use.get(name, 0)) for name in (*node.input, *used)})
        found, live = {}, set(self.inputs)
        owned: set[str] = set()
        for position, (node, used) in enumerate(zip(self.body, self.uses, strict=True)):
            owned |= used
            live = {name for name in (*live, *node.output) if last_use.get(name, -1) > position}
            if len(live) == 1 and not live.intersection(self.inputs) and not any(last_use[name] > position for name in owned):
                (found[position],) = live
        return found
