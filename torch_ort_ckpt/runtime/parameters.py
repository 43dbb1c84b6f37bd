"""The tensors of an `OrtModule`: where each tensor of the checkpoint is in the module tree, and what the graph takes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..checkpoint.state import CheckpointState, is_string
from ..engines import Engine
from ..engines.ort.memory import side_by_side
from ..errors import CheckpointError, UnsupportedError
from ..graphs.artifacts import Artifacts
from ..graphs.batch_norms import batch_norms
from ..pytorch_private import foreach_add_
from .optimizer_state import SavedMoments
from .scopes import Scope, compute_values, is_computed, lookup, materialize, place, refresh_values, tree_order

Place = tuple[nn.Module, str]
"""A tensor's owner, and its key there."""


class ParameterTable:
    """What a module knows of its tensors. It refers to their places, never to the tensors, which users may replace at any time."""

    def __init__(self, artifacts: Artifacts, state: CheckpointState) -> None:
        self._artifacts = artifacts
        self.properties = dict(state.properties)
        self.partitions = dict(state.partitions)
        self.half_precision = {name: alias.dtype for name, alias in state.mixed_precision.items()}
        self.strings = {name: value for name, value in state.frozen.items() if is_string(value)}
        self.saved_moments = SavedMoments(dict(state.optimizer))
        self.trainable = list(state.trainable)
        self.frozen = [name for name in state.frozen if name not in self.strings]
        counters = {name for name in self.names if name.endswith("num_batches_tracked")}
        self._nominal = set(self.names) - counters if state.nominal else set()  # counters start at zero, as in PyTorch
        self._unfilled = set(self._nominal)
        self.scopes: list[Scope] = []
        self.hooked: list[Scope] = []
        """Scopes with hooks that compute parameters."""
        self._places: dict[str, Place] = {}
        order = {name: index for index, name in enumerate(artifacts.parameters)}
        self._trained = [order[name] for name in artifacts.trainable]
        self._constant = sorted(set(order.values()) - set(self._trained)) if artifacts.training_path is not None else []
        self._graph_places: list[Place] = []
        """Of the parameters that the graph takes, in its order."""
        self._counters: list[Place] = []

    @property
    def names(self) -> list[str]:
        return [*self.trainable, *self.frozen]

    def register(self, root: nn.Module, state: CheckpointState, engine: Engine, device: torch.device) -> None:
        """Give `root` one parameter or buffer per tensor of the checkpoint, at its dotted name."""
        artifacts, values = self._artifacts, state.parameters
        norms = batch_norms(artifacts.training) if artifacts.training is not None else []
        buffers = {name for norm in norms for name in (norm.mean, norm.variance)} | artifacts.buffers
        memory = self._adjacent_memory(state) if engine.prefers_adjacent_parameters else {}
        places = {}
        for name in artifacts.in_order(self.names):
            tensor = materialize(name, values[name], artifacts.parameters, state.nominal, device, memory.get(name))
            owner, key = places[name] = place(root, name, self.hooked)
            if name in state.trainable or (tensor.is_floating_point() and name not in buffers):
                owner._parameters[key] = nn.Parameter(tensor, requires_grad=name in state.trainable)
            else:
                owner._buffers[key] = tensor
        self._places.update((name, places[name]) for name in tree_order(root))
        self._graph_places += [places[name] for name in artifacts.parameters]
        self.scopes += [module for module in root.modules() if isinstance(module, Scope)]
        used = Counter(norm.mean.rpartition(".")[0] for norm in norms)
        used.update({name.rpartition(".")[0]: steps for name, steps in artifacts.counters.items()})
        counters = [name for name in self.names if name.endswith("num_batches_tracked")]
        self._counters += [places[name] for name in counters for _ in range(used[name.rpartition(".")[0]])]

    def _adjacent_memory(self, state: CheckpointState) -> dict[str, torch.Tensor]:
        """For the trainable parameters, in the order of their gradients: an update then treats them as one tensor."""
        specs = self._artifacts.parameters
        shapes: dict[str, Any] = {
            name: tuple(specs[name].shape or ()) if state.nominal else tuple(state.trainable[name].shape)
            for name in self._artifacts.trainable
            if name in state.trainable and state.trainable[name].dtype is torch.float32
        }
        return dict(zip(shapes, side_by_side(list(shapes.values())), strict=True))

    def current(self, *, training: bool, computed: list[str] | None = None) -> list[torch.Tensor]:
        """The tensors that the graph takes, in its order: they may have been replaced since the last step.

        Names of those that a parametrization or a hook computes from others are added to `computed`."""
        if self._unfilled:
            self.require_values()
        if self.hooked:
            compute_values(self.hooked)
        tensors: list[torch.Tensor] = [
            owner._parameters[key] if key in owner._parameters else lookup(owner, key, computed)  # type: ignore[misc]  # never None: we put it there
            for owner, key in self._graph_places
        ]
        for index in self._constant if training else ():
            if tensors[index].requires_grad:
                raise UnsupportedError(
                    "requires a gradient, but the training graph does not compute one",
                    field=list(self._artifacts.parameters)[index],
                    remedy="Export the artifacts with it trainable, or call requires_grad_(False).",
                )
        return tensors

    def trained(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of the graph's tensors those that it gives gradients for."""
        return [tensors[index] for index in self._trained]

    @torch.no_grad()
    def count_batches(self) -> None:
        """Update `num_batches_tracked` of BatchNorm, which the graph does not contain."""
        if self._counters:
            counters = [lookup(*place) for place in self._counters]
            times = Counter(map(id, counters))  # a BatchNorm that is used twice: CUDA's kernel must not get a tensor twice
            once = {id(counter): counter for counter in counters}
            foreach_add_(list(once.values()), [times[key] for key in once])

    def named_trainable(self) -> dict[str, torch.Tensor]:
        trained = self._artifacts.gradients
        return {name: lookup(*place) for name, place in self._places.items() if name in trained}

    def named(self) -> dict[str, torch.Tensor]:
        return {name: lookup(*place) for name, place in self._places.items()}

    def refuse_computed(self, names: Iterable[str]) -> None:
        """Raise if one of these tensors is computed from others: a value assigned to it would be lost."""
        for name in names:
            if is_computed(*self._places[name]):
                raise UnsupportedError(
                    "is computed by pruning, a weight norm or a parametrization: it can't be assigned a value, and has no moments",
                    field=name,
                    remedy="Remove that first (prune.remove, remove_weight_norm, remove_parametrizations), or use model.state_dict().",
                )

    def refresh(self, root: nn.Module) -> None:
        """Compute what hooks compute, between two steps."""
        refresh_values([root, *self.hooked])

    # Values of a nominal checkpoint

    @property
    def nominal(self) -> bool:
        return bool(self._unfilled)

    @property
    def partly_filled(self) -> bool:
        """Whether some parameters of a nominal checkpoint have values and others do not."""
        return self.nominal and self._unfilled != self._nominal

    def fill(self, names: Iterable[str]) -> None:
        """These parameters of a nominal checkpoint have been given values."""
        self._unfilled -= set(names)

    def require_values(self) -> None:
        """Raise if values are needed that a nominal checkpoint does not have."""
        if self._unfilled:
            names = [name for name in self._places if name in self._unfilled]
            raise CheckpointError(
                f"the checkpoint is nominal: {len(names)} parameters have no values yet ({', '.join(names[:5])})",
                path=self._artifacts.checkpoint_path,
                remedy="Call model.load_checkpoint(state) or model.load_state_dict(...) first.",
            )
