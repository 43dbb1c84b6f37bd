"""`OrtOptimizer`: the optimizer graph of the artifacts as a `torch.optim.Optimizer`, on the same memory as the model."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_ as _is
from typing import Any

import torch
from torch import nn

from ..checkpoint.state import DEFAULT_LR, OptimizerGroup
from ..checkpoint.training_graph import GraphOptimizer, only_graph
from ..engines.ort.graph_updates import GraphUpdater
from ..engines.ort.memory import zeros_like_all
from ..engines.updates import TorchUpdater, Update, Updater, clip_gradients
from ..errors import CheckpointError, UnsupportedError
from ..graphs.artifacts import OptimizerSpec
from ..pytorch_private import has_step_hooks, profiler_enabled
from . import optimizer_checkpoints
from .module import OrtModule
from .optimizer_state import (
    MOMENTS,
    at_one_step,
    check_counts,
    check_options,
    count_tensor,
    in_own_order,
    part_steps,
    share_steps,
    torch_defaults,
    update_of,
    warn_of_zeros,
    with_gradients,
)

_States = tuple[list[torch.Tensor], list[dict[str, Any]], list[dict[str, Any]]]
"""Parameters, all entries of the optimizer's state, and the entries of these parameters."""


class OrtOptimizer(GraphOptimizer):
    """Updates the model's parameters as `optimizer_model.onnx` defines.

    The graph runs in ONNX Runtime, on the CPU and on CUDA; with `fused=True` the same mathematics run on PyTorch's kernels (the only way
    without ONNX Runtime, and the default there). The rate is read from `param_groups` at each step, so every scheduler works. Moments
    and step of the checkpoint that the model was loaded from go to the first optimizer of each parameter; `lr` defaults to its rate,
    or ORT's 0.001.

    `params` may define groups with their own rates, as for any PyTorch optimizer. Parameters are in the order of
    `model.named_parameters()`, and state dicts contain their names. A parameter without a gradient is not stepped, and each has its own
    count, as in PyTorch (ORT's checkpoints have one count for all: the others are kept in properties of this library).
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        params: Iterable[Any] | None = None,
        fused: bool | None = None,
    ) -> None:
        self.model = _graph_of(model)
        self.spec = self.model.artifacts.optimizer_spec
        self.fused = fused if fused is not None else not self.model.engine.runs_optimizer_graph
        if self.fused and not self.spec.known:
            raise UnsupportedError(
                "the hyper-parameters of a .ort optimizer graph can't be read", remedy="Keep optimizer_model.onnx, or use fused=False."
            )
        self.updated = False
        self._updater: Updater | None = None
        self._known_states: dict[int, _States] = {}
        self._key = uuid.uuid4().hex  # identifies to the model which optimizer has a parameter's moments
        saved = self.model._table.saved_moments.groups
        if lr is None:
            lr = next((group.lr for group in saved.values() if group.lr is not None), DEFAULT_LR)
        given = list(params) if params is not None else list({id(value): value for value in self.model.named_trainable().values()}.values())
        if not given:
            lacking = "there is no training_model" if self.model.artifacts.training_path is None else "the training_model trains none"
            raise CheckpointError(
                f"no parameters to train: {lacking}",
                path=self.model.artifacts.folder,
                remedy="Export artifacts with trainable parameters.",
            )
        super().__init__(given, {"lr": lr, **torch_defaults(self.spec)})
        if saved:
            self.load_groups(saved)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. `self.updated` is False if it was skipped: by the graph, or because there are no gradients; the step count
        then does not change."""
        # PyTorch's wrapper around `step` takes as long as the graph on a small model, so it is only used when needed.
        if closure is not None or self._is_watched() or torch.compiler.is_compiling():
            return self._watched_step(closure)
        with torch.no_grad():
            self._step()
        return None

    step.hooked = True  # type: ignore[attr-defined]  # tells torch.optim.Optimizer not to wrap it

    def _is_watched(self) -> bool:
        """Whether there are step hooks to call, or a profiler is active."""
        return has_step_hooks(self) or profiler_enabled()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As for every optimizer, but without `record_function` if no profiler is active: it takes longer than the rest."""
        if not set_to_none or profiler_enabled() or torch.compiler.is_compiling():
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.optim.Optimizer.profile_hook_step
    @torch.no_grad()
    def _watched_step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def _step(self) -> None:
        self.updated = False
        for group in self.param_groups:
            for update, step in self._updates(group):
                if self._update_with().apply(update):
                    step.fill_(update.step)
                    self.updated = True

    def _updates(self, group: dict[str, Any]) -> Iterator[tuple[Update, torch.Tensor]]:
        """What the graph is run on, and the tensor that counts its runs: usually once for a group, for the graph takes one count."""
        parameters, gradients = with_gradients(group["params"])
        if not parameters:
            return
        states, spec, lr = self._states(parameters, group), self._hyperparameters(group), float(group["lr"])
        if len(parameters) < len(group["params"]) and self.spec.kind != "SGD":
            part_steps(states, [self.state[other] for other in group["params"] if other.grad is None and self.state.get(other)])
        if at_one_step(states):
            yield update_of(parameters, gradients, states, lr=lr, spec=spec)
            return
        counts = share_steps(states, self.spec)
        check_counts(counts, self.spec, self.fused)
        if len(counts) > 1 and spec.max_norm is not None:  # of all gradients together
            clip_gradients(gradients, spec.max_norm)
            spec = dataclasses.replace(spec, max_norm=None)
        for places in counts.values():
            yield update_of(*(_chosen(values, places) for values in (parameters, gradients, states)), lr=lr, spec=spec)

    def _states(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> list[dict[str, Any]]:
        """The parameters' entries of `self.state`. Looking each up takes long (tensors are hashed by a Python function), so they are
        kept for as long as `self.state` holds the same entries."""
        known = self._known_states.get(id(group))
        if known is not None:
            owners, entries, states = known
            values = self.state.values()
            unchanged = len(values) == len(entries) and all(map(_is, values, entries))
            if unchanged and len(owners) == len(parameters) and all(map(_is, parameters, owners)):
                return states
        self._create_states(parameters, group)
        states = [self.state[parameter] for parameter in parameters]
        self._known_states[id(group)] = (list(parameters), list(self.state.values()), states)
        return states

    def _create_states(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        missing = [parameter for parameter in parameters if not self.state.get(parameter)]
        if not missing:
            return
        if elsewhere := self._claim(missing):
            warn_of_zeros(elsewhere)
        step = count_tensor(0)
        moments = [zeros_like_all(missing) for _ in MOMENTS[self.spec.kind]]
        for parameter, *own in zip(missing, *moments, strict=True):
            self.state[parameter] = {"step": step, **dict(zip(MOMENTS[self.spec.kind], own, strict=True))}
        if self.spec.kind == "SGD":
            share_steps([self.state[parameter] for parameter in group["params"] if self.state.get(parameter)], self.spec)

    def create_moments(self) -> None:
        """Create the moments now (zeros), rather than at a parameter's first update."""
        for group in self.param_groups:
            self._create_states(group["params"], group)

    def _update_with(self) -> Updater:
        if self._updater is None:
            model = self.model
            self._updater = TorchUpdater() if self.fused else GraphUpdater(model.artifacts, model.options)
        return self._updater

    def _hyperparameters(self, group: dict[str, Any]) -> OptimizerSpec:
        spec = self.spec
        check_options(group, spec)
        if spec.kind == "SGD" or (group["betas"], group["eps"], group["weight_decay"]) == (spec.betas, spec.eps, spec.weight_decay):
            return spec
        return dataclasses.replace(
            self.spec, betas=tuple(group["betas"]), eps=float(group["eps"]), weight_decay=float(group["weight_decay"])
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with its own rate and hyper-parameters: the graph runs once per group."""
        if self.spec.max_norm is not None and self.param_groups:
            raise UnsupportedError(
                "the graph clips the gradients of all parameters together, so it does not support several groups",
                remedy="Export the optimizer without max_norm and clip with torch.nn.utils.clip_grad_norm_.",
            )
        check_options(param_group, self.spec)
        names: dict[int, str] = {}
        for name, value in self.model.named_trainable().items():
            names.setdefault(id(value), name)  # of tied ones the first
        given = param_group["params"]
        values = [given] if isinstance(given, torch.Tensor) else [one[1] if isinstance(one, tuple) else one for one in given]
        if any(id(value) not in names for value in values):
            raise UnsupportedError(
                "the optimizer graph trains only parameters of the model that the training graph gives gradients for",
                remedy="Give other parameters to an optimizer of torch.optim.",
            )
        super().add_param_group({**param_group, "params": [(names[id(value)], value) for value in values]})

    def _claim(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        """Register this optimizer as owner of the parameters' moments; returns those that another optimizer has moments for."""
        names = {id(value): name for group in self.param_groups for name, value in zip(group["param_names"], group["params"], strict=True)}
        return self.model._table.saved_moments.claim([names[id(parameter)] for parameter in parameters], self._key)

    def state_dict(self) -> dict[str, Any]:
        """The same structure as `torch.optim.AdamW`: every parameter has its own step tensor."""
        result: dict[str, Any] = super().state_dict()
        result["state"] = {
            index: {key: value.clone() if key == "step" else value for key, value in state.items()}
            for index, state in result["state"].items()
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also loads the state of `torch.optim.AdamW` (or `SGD`), hyper-parameters included.

        Parameters are matched by `param_names`. A state dict without them must be in this optimizer's order; shapes that do not fit are
        refused. Everything is checked before anything changes.
        """

        def match(_: torch.optim.Optimizer, content: dict[str, Any]) -> dict[str, Any]:
            found = in_own_order(content, self.param_groups, self.spec, self.model.artifacts.trainable)
            for group in found["param_groups"]:
                states = [found["state"][index] for index in group["params"] if found["state"].get(index)]
                check_counts({int(state.get("step", 0)): state for state in states if MOMENTS[self.spec.kind]}, self.spec, self.fused)
            return found

        handle = self.register_load_state_dict_pre_hook(match)  # runs last: user hooks may add names
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group in self.param_groups:
            for key, value in torch_defaults(self.spec).items():
                group.setdefault(key, value)
            owners = [parameter for parameter in group["params"] if self.state.get(parameter)]
            states = [self.state[parameter] for parameter in owners]
            for state in states:
                state["step"] = count_tensor(state.get("step", 0))
            share_steps(states, self.spec)
            for name in MOMENTS[self.spec.kind]:
                for state, place in zip(states, zeros_like_all(owners), strict=True):
                    state[name] = place.copy_(state[name])
            self._claim(owners)

    def set_step(self, parameter: torch.Tensor, count: int) -> None:
        """Set a parameter's step count."""
        group = next(group for group in self.param_groups if any(own is parameter for own in group["params"]))
        self._create_states([parameter], group)
        self.state[parameter]["step"] = count_tensor(count)
        share_steps([self.state[own] for own in group["params"] if self.state.get(own)], self.spec)

    @property
    def checkpoint_step(self) -> int:
        """Completed steps, as a checkpoint counts them (of the group furthest along)."""
        return max((int(state["step"].item()) for state in self.state.values() if state), default=0)

    def groups(self) -> dict[str, OptimizerGroup]:
        """The optimizer's state as a checkpoint holds it, on the same memory (SGD's moments are zeros, as ORT writes them)."""
        return optimizer_checkpoints.groups(self)

    def load_groups(self, groups: Mapping[str, OptimizerGroup]) -> None:
        """Load moments, steps and (if known) the rate of a checkpoint. Everything is checked before anything changes.

        Parameters that the checkpoint has no moments for start from zero; if it has none at all, only the step is loaded, as ORT
        does.
        """
        optimizer_checkpoints.load_groups(self, groups)

    def to_torch(self) -> torch.optim.Optimizer:
        """A plain `torch.optim.AdamW` or `SGD` that continues from this state, if PyTorch has the same mathematics."""
        return optimizer_checkpoints.to_torch(self)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "model": self.model,
            "spec": self.spec,
            "fused": self.fused,
            "updated": self.updated,
            "_key": self._key,
            "_updater": None,
            "_known_states": {},
        }


def _chosen(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [values[place] for place in places]


def _graph_of(model: nn.Module) -> OrtModule:
    """The OrtModule inside DistributedDataParallel and the like: whatever holds no parameters but its own."""
    found = only_graph(model)
    if not isinstance(found, OrtModule) or len(list(found.parameters())) != len(list(model.parameters())):
        raise CheckpointError(f"expected an OrtModule, not {type(model).__name__}", remedy="Use a torch.optim optimizer for it.")
    return found
