"""`OrtOptimizer`: the optimizer graph of the artifacts as a `torch.optim.Optimizer`, on the same memory as the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter, itemgetter
from operator import is_ as _is
from typing import Any

import torch
from torch import nn

from ..artifacts import OptimizerSpec
from ..engines.graph_updates import GraphUpdater
from ..engines.memory import zeros_like_all
from ..engines.updates import TorchUpdater, Update, Updater
from ..errors import CheckpointError, UnsupportedError
from ..pytorch_private import has_step_hooks, profiler_enabled, set_grad_enabled
from ..state import DEFAULT_LR, OptimizerGroup
from .module import OrtModule

HYPERPARAMETERS = ("betas", "eps", "weight_decay")
"""What AdamW's graph holds as attributes; a parameter group (or a scheduler, like OneCycleLR) may have other values."""

MOMENTS = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ()}
"""PyTorch's names of the moments that the update reads and writes."""


_States = tuple[list[torch.Tensor], list[dict[str, Any]], list[dict[str, Any]]]
"""Parameters, all entries of the optimizer's state, and those of the parameters."""

_MOMENTS_OF = {kind: [itemgetter(name) for name in names] for kind, names in MOMENTS.items()}
_is_none, _grad = partial(_is, None), attrgetter("grad")


class OrtOptimizer(torch.optim.Optimizer):
    """Updates the model's parameters as `optimizer_model.onnx` says.

    The graph runs in ONNX Runtime; with `fused=True` the same mathematics run on PyTorch's kernels (the only way on CUDA and without
    ONNX Runtime, and the default there). The rate is read from `param_groups` at each step, so every scheduler works. Moments and step
    of the checkpoint that the model was loaded from are taken over; `lr` defaults to its rate, or ORT's 0.001.

    `params` may give groups with rates of their own, as for any PyTorch optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        params: Iterable[Any] | None = None,
        fused: bool | None = None,
    ) -> None:
        self.model = unwrap(model)
        self.spec = self.model.artifacts.optimizer_spec
        self.fused = fused if fused is not None else (self.model.engine.name != "ort" or self.model.device.type != "cpu")
        if self.fused and not self.spec.known:
            raise UnsupportedError(
                "the hyper-parameters of a .ort optimizer graph can't be read", remedy="Keep optimizer_model.onnx, or use fused=False."
            )
        self.updated = True
        self._updater: Updater | None = None
        self._known_states: dict[int, _States] = {}
        known = {id(value): name for name, value in self.model.named_trainable().items()}
        saved = self.model.take_optimizer_groups()
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
        super().__init__(given, {"lr": lr, **_torch_defaults(self.spec)})
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise UnsupportedError(
                        "the optimizer graph trains only parameters of the model that the training graph gives gradients for",
                        remedy="Give other parameters to an optimizer of torch.optim.",
                    )
        if self.spec.max_norm is not None and len(self.param_groups) > 1:
            raise UnsupportedError(
                "the graph clips the gradients of all parameters together, it can't serve several groups",
                remedy="Export the optimizer without max_norm and clip with torch.nn.utils.clip_grad_norm_.",
            )
        if saved:
            self.load_groups(saved)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. `self.updated` tells whether the graph made it (graphs can skip; the step count then stays)."""
        # PyTorch's wrapper around every `step` costs as much as the graph's run on a small model: only where it has something to do.
        if closure is not None or self._is_watched() or torch.compiler.is_compiling():
            return self._watched_step(closure)
        before = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            for group in self.param_groups:
                self._step_group(group)
        finally:
            set_grad_enabled(before)
        return None

    step.hooked = True  # type: ignore[attr-defined]  # tells torch.optim.Optimizer not to wrap it

    def _is_watched(self) -> bool:
        """Whether there are step hooks to call, or a profiler to tell."""
        return has_step_hooks(self) or profiler_enabled()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As for every optimizer; without the record for a profiler where there is none, which takes longer than the rest."""
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
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters: list[torch.Tensor] = group["params"]
        gradients: list[Any] = list(map(_grad, parameters))
        if any(map(_is_none, gradients)):
            parameters = [parameter for parameter in parameters if parameter.grad is not None]
            gradients = [gradient for gradient in gradients if gradient is not None]
            if not parameters:
                return
        states = self._states(parameters, group)
        step: torch.Tensor = states[0]["step"]
        count = int(step.item()) + 1
        moments = [list(map(get, states)) for get in _MOMENTS_OF[self.spec.kind]] or [[], []]
        self.updated = self._update_with().apply(
            Update(
                parameters=parameters,
                gradients=gradients,
                first=moments[0],
                second=moments[1],
                step=count,
                lr=float(group["lr"]),
                hyperparameters=self._hyperparameters(group),
            )
        )
        if self.updated:
            step.fill_(count)

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
        # ORT counts the steps of the whole group: all its parameters share one tensor.
        known = [self.state[other]["step"] for other in group["params"] if self.state.get(other)]
        step = known[0] if known else torch.zeros(())
        moments = [zeros_like_all(missing) for _ in MOMENTS[self.spec.kind]]
        for parameter, *own in zip(missing, *moments, strict=True):
            self.state[parameter] = {"step": step, **dict(zip(MOMENTS[self.spec.kind], own, strict=True))}

    def create_moments(self) -> None:
        """Make the moments now (zeros), rather than at a parameter's first update."""
        for group in self.param_groups:
            self._create_states(group["params"], group)

    def _update_with(self) -> Updater:
        if self._updater is None:
            model = self.model
            self._updater = TorchUpdater() if self.fused else GraphUpdater(model.artifacts, model.options)
        return self._updater

    def _hyperparameters(self, group: dict[str, Any]) -> OptimizerSpec:
        spec = self.spec
        if spec.kind == "SGD" or (group["betas"], group["eps"], group["weight_decay"]) == (spec.betas, spec.eps, spec.weight_decay):
            return spec
        return dataclasses.replace(
            self.spec, betas=tuple(group["betas"]), eps=float(group["eps"]), weight_decay=float(group["weight_decay"])
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A group with a rate and hyper-parameters of its own: the graph runs once per group."""
        if self.spec.max_norm is not None and self.param_groups:
            raise UnsupportedError(
                "the graph clips the gradients of all parameters together, it can't serve several groups",
                remedy="Export the optimizer without max_norm and clip with torch.nn.utils.clip_grad_norm_.",
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.AdamW` has it: every parameter with a step tensor of its own."""
        result: dict[str, Any] = super().state_dict()
        result["state"] = {
            index: {key: value.clone() if key == "step" else value for key, value in state.items()}
            for index, state in result["state"].items()
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also loads the state of `torch.optim.AdamW` (or `SGD`), hyper-parameters included."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for key, value in _torch_defaults(self.spec).items():
                group.setdefault(key, value)
            self._tie_steps(group)

    def _tie_steps(self, group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in group["params"] if self.state.get(parameter)]
        steps = {int(torch.as_tensor(state.get("step", 0)).item()) for state in states}
        if len(steps) > 1:
            raise UnsupportedError(
                f"parameters of one group at different steps ({min(steps)} to {max(steps)}); ORT counts one step per group",
                field="step",
                remedy="Put them into separate groups, or keep training with the optimizer that made this state.",
            )
        shared = torch.tensor(float(steps.pop() if steps else 0))
        owners = [parameter for parameter in group["params"] if self.state.get(parameter)]
        for state in states:
            state["step"] = shared
        for name in MOMENTS[self.spec.kind]:
            if any(name not in state for state in states):
                raise CheckpointError(f"the state has no {name}", field=name, remedy="It is of another kind of optimizer.")
            for state, place in zip(states, zeros_like_all(owners), strict=True):
                state[name] = place.copy_(state[name])

    @property
    def checkpoint_step(self) -> int:
        """Completed steps, as a checkpoint counts them (of the group furthest along)."""
        return max((int(state["step"].item()) for state in self.state.values() if state), default=0)

    def groups(self) -> dict[str, OptimizerGroup]:
        """The optimizer's state as a checkpoint holds it, on the same memory (SGD's moments are zeros, as ORT writes them)."""
        names = {id(value): name for name, value in self.model.named_trainable().items()}
        result = {}
        for index, group in enumerate(self.param_groups):
            states: dict[str, dict[str, Any]] = {}
            step = 0
            for parameter in group["params"]:
                state = self.state.get(parameter) or {}
                step = max(step, int(state["step"].item()) if state else 0)
                keys = MOMENTS[self.spec.kind] or ("momentum_buffer",)
                states[names[id(parameter)]] = {
                    f"momentum{number}": state[key] if key in state else torch.zeros_like(parameter.detach())
                    for number, key in enumerate(keys)
                }
            hyperparameters = {key: list(group[key]) if key == "betas" else group[key] for key in HYPERPARAMETERS if key in group}
            if self.spec.kind == "SGD":
                hyperparameters = {}
            initial = float(group.get("initial_lr", DEFAULT_LR))
            result[f"group{index}"] = OptimizerGroup(step, initial, float(group["lr"]), states, hyperparameters)
        return result

    @torch.no_grad()
    def load_groups(self, groups: Mapping[str, OptimizerGroup]) -> None:
        """Take over moments, step and (where known) the rate of a checkpoint."""
        parameters = self.model.named_trainable()
        saved = {name: (group, states) for group in groups.values() for name, states in group.states.items()}
        for index, own in enumerate(self.param_groups):
            mine = {id(parameter) for parameter in own["params"]}
            members = [name for name, parameter in parameters.items() if id(parameter) in mine and name in saved]
            source = saved[members[0]][0] if members else groups.get(f"group{index}")
            if source is None:
                continue
            if source.lr is not None:
                own["lr"] = source.lr
            own.update({key: tuple(value) if key == "betas" else value for key, value in source.hyperparameters.items() if key in own})
            shared = torch.tensor(float(source.step))
            made: dict[str, dict[str, Any]] = {name: {"step": shared} for name in members}
            for number, key in enumerate(MOMENTS[self.spec.kind]):
                for name, place in zip(members, zeros_like_all([parameters[name] for name in members]), strict=True):
                    moment = saved[name][1].get(f"momentum{number}")
                    if moment is None or moment.shape != place.shape:
                        raise CheckpointError(
                            "no moment of the parameter's shape",
                            field=f"{name}/momentum{number}",
                            remedy="Load weights only: leave the optimizer out of load_checkpoint.",
                        )
                    made[name][key] = place.copy_(moment.detach())
            for name, state in made.items():
                self.state[parameters[name]] = state

    def to_torch(self) -> torch.optim.Optimizer:
        """A plain `torch.optim.AdamW` or `SGD` that goes on from here, where PyTorch has the same mathematics."""
        spec = self.spec
        if not spec.known:
            raise UnsupportedError("the hyper-parameters of a .ort optimizer graph can't be read", remedy="Keep optimizer_model.onnx.")
        if spec.max_norm is not None:
            raise UnsupportedError(
                "the graph clips gradients, torch.optim does not", remedy="Export without clipping and call clip_grad_norm_ yourself."
            )
        if spec.kind == "AdamW" and (spec.adam_mode == 1 or not spec.correct_bias):
            raise UnsupportedError(
                f"adam_mode={spec.adam_mode}, correct_bias={spec.correct_bias}: epsilon and decay enter unlike in torch.optim.AdamW",
                remedy="Use OrtOptimizer(fused=True), or export with adam_mode=0.",
            )
        groups = [{key: value for key, value in group.items() if key not in ("foreach", "fused")} for group in self.param_groups]
        kind: Any = torch.optim.SGD if spec.kind == "SGD" else torch.optim.AdamW
        optimizer: torch.optim.Optimizer = kind(groups, lr=self.param_groups[0]["lr"])
        optimizer.load_state_dict(self.state_dict())
        return optimizer

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "model": self.model,
            "spec": self.spec,
            "fused": self.fused,
            "updated": True,
            "_updater": None,
            "_known_states": {},
        }


def unwrap(model: nn.Module) -> OrtModule:
    """The OrtModule inside DistributedDataParallel and the like."""
    inner = model
    while not isinstance(inner, OrtModule):
        wrapped = getattr(inner, "module", None)
        if not isinstance(wrapped, nn.Module):
            raise CheckpointError(f"expected an OrtModule, not {type(model).__name__}", remedy="Use a torch.optim optimizer for it.")
        inner = wrapped
    return inner


def _torch_defaults(spec: OptimizerSpec) -> dict[str, Any]:
    """What a torch.optim parameter group of this kind holds, so that states can be exchanged."""
    if spec.kind == "SGD":
        return {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
    return {"betas": spec.betas, "eps": spec.eps, "weight_decay": spec.weight_decay, "amsgrad": False, "maximize": False}
