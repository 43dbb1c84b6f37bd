"""Conversion of live training objects to what an entry stores, and back.

The model's and the optimizer's state dicts are stored completely, by parameter name, for any class; their tensors are references into
the ORT checkpoint if it contains them. So one code path restores an `OrtModule` with `OrtOptimizer` and any module with any optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..checkpoint.bridge import TO_ORT_MOMENTS, group_from_torch
from ..checkpoint.state import CheckpointState
from ..checkpoint.training_graph import GraphOptimizer, TrainingGraph, unwrap
from ..cuda.staging import Staging
from ..errors import CheckpointError
from ..pytorch_private import is_zero
from . import tree
from .distributed import is_sharded, rank
from .randomness import random_states, set_random_states


@dataclass
class Training:
    """Everything a resume needs, as live objects.

    `data` is anything with `state_dict` and `load_state_dict` (a `Feed`); `progress` holds the counters (plain numbers and text), which
    are also written into the ORT checkpoint's properties. `gradients` says that an accumulation window is open.
    """

    model: nn.Module
    optimizer: Optimizer | None = None
    scheduler: Any = None
    scaler: Any = None
    data: Any = None
    progress: dict[str, int | float | str] = field(default_factory=dict)
    gradients: bool = False


@dataclass
class Captured:
    """What will be written. `state` and `shared` are the first rank's; `local` is this rank's own."""

    state: CheckpointState | None
    shared: tuple[Any, dict[str, torch.Tensor]] | None
    local: tuple[Any, dict[str, torch.Tensor]]
    staging: Staging | None = None

    def staged(self) -> Captured:
        """A copy in the host's memory that is independent of further training; `wait` before reading it."""
        staging = Staging()

        def copied(part: tuple[Any, dict[str, torch.Tensor]]) -> tuple[Any, dict[str, torch.Tensor]]:
            return part[0], {name: staging.copy(value) for name, value in part[1].items()}

        state = self.state.copied_by(staging.copy) if self.state is not None else None
        shared = copied(self.shared) if self.shared is not None else None
        return Captured(state, shared, copied(self.local), staging.finish())

    def wait(self) -> None:
        """Wait until the copies of a device's tensors have arrived."""
        if self.staging is not None:
            self.staging.wait()


def capture(training: Training) -> Captured:
    """Collect the state without copying it. With sharded parameters or optimizer state every rank must take part."""
    model = unwrap(training.model)
    model_dict, optimizer_dict = _state_dicts(training)
    local = {
        "random": random_states(device_of(model)),
        "data": training.data.state_dict() if training.data is not None else None,
        "gradients": _gradients(model) if training.gradients else None,
    }
    own = tree.encode(local, {})
    if rank() != 0:
        return Captured(None, None, own)
    state = _checkpoint(model, model_dict, training.optimizer, optimizer_dict, training.progress)
    shared = {
        "model": model_dict,
        "dropout": [model.seed, model.draws] if isinstance(model, TrainingGraph) else None,
        "optimizer": optimizer_dict,
        "scheduler": training.scheduler.state_dict() if training.scheduler is not None else None,
        "scaler": training.scaler.state_dict() if training.scaler is not None else None,
        "progress": dict(training.progress),
    }
    return Captured(state, tree.encode(shared, tree.labels(state)), own)


def restore(training: Training, shared: Mapping[str, Any], local: Mapping[str, Any], gradients: Mapping[str, torch.Tensor] | None) -> None:
    """Restore everything; `training.progress` receives the counters."""
    model = unwrap(training.model)
    _load_state_dicts(training, shared["model"], shared["optimizer"])
    for name in ("scheduler", "scaler"):
        target, content = getattr(training, name), shared[name]
        if target is None or (content is None and name == "scaler"):
            continue
        if content is None:
            raise CheckpointError(
                f"the entry holds no state of a {name}", field=name, remedy="It was saved without one: resume without one."
            )
        target.load_state_dict(content)
    if training.data is not None and local["data"] is not None:
        training.data.load_state_dict(local["data"])
    set_random_states(local["random"], device_of(model))
    if shared["dropout"] is not None and isinstance(model, TrainingGraph):
        model.seed_dropout(*shared["dropout"])  # after torch's generators, whose seed it depends on
    model.zero_grad(set_to_none=True)
    if gradients is not None:
        _set_gradients(model, gradients)
    training.progress.update(shared["progress"])


def device_of(model: nn.Module) -> torch.device | None:
    """The GPU that the model is on; None for a model elsewhere."""
    device = next((parameter.device for parameter in model.parameters()), None)
    return device if device is not None and device.type == "cuda" else None


# State dicts by parameter name


def _state_dicts(training: Training) -> tuple[dict[str, Any], dict[str, Any] | None]:
    model, optimizer = unwrap(training.model), training.optimizer
    if is_sharded(model):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        moments = get_optimizer_state_dict(model, optimizer, options=options) if optimizer is not None else None
        return get_model_state_dict(model, options=options), moments
    if optimizer is None:
        return model.state_dict(), None
    if is_zero(optimizer):
        optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined]  # ZeroRedundancyOptimizer's
        if rank() != 0:
            return model.state_dict(), None
    return model.state_dict(), _named(optimizer.state_dict(), _names(model, optimizer))


def _load_state_dicts(training: Training, model_dict: dict[str, Any], optimizer_dict: dict[str, Any] | None) -> None:
    model, optimizer = unwrap(training.model), training.optimizer
    if optimizer is not None and optimizer_dict is None:
        raise CheckpointError("the entry holds no optimizer state", field="optimizer", remedy="Restore without the optimizer.")
    if is_sharded(model):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, model_dict, options=options)
        if optimizer is not None and optimizer_dict is not None:
            set_optimizer_state_dict(model, optimizer, optimizer_dict, options=options)
        return
    try:
        model.load_state_dict(model_dict)
        if optimizer is not None and optimizer_dict is not None:
            optimizer.load_state_dict(_numbered(optimizer_dict, _names(model, optimizer), optimizer))
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"the entry does not fit the model and optimizer: {error}", remedy="It was saved from others.") from error


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The optimizer's parameters in its own order, by the model's names."""
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [named.get(id(parameter), f"parameter {index}") for index, parameter in enumerate(found)]


def _named(content: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {
        **content,
        "state": {names[index]: states for index, states in content["state"].items()},
        "param_groups": [{**group, "params": [names[index] for index in group["params"]]} for group in content["param_groups"]],
    }


def _numbered(content: Mapping[str, Any], names: list[str], optimizer: Optimizer) -> dict[str, Any]:
    """As `load_state_dict` wants it, for an optimizer whose parameters are `names`; tensors are copied: some optimizers keep references.

    PyTorch matches by position: each group's parameters must be in the optimizer's order, whatever their saved order.
    """
    index = {name: number for number, name in enumerate(names)}
    groups, start = [], 0
    for number, (group, own) in enumerate(zip(content["param_groups"], optimizer.param_groups, strict=True)):
        members = list(range(start, start + len(own["params"])))
        if sorted(index[name] for name in group["params"]) != members:
            raise ValueError(f"parameter group {number} has different parameters")
        groups.append({**group, "params": members, **({"param_names": own["param_names"]} if "param_names" in own else {})})
        start += len(members)

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    return {
        **content,
        "state": {index[name]: {key: copied(value) for key, value in states.items()} for name, states in content["state"].items()},
        "param_groups": groups,
    }


# The ORT checkpoint


def _checkpoint(
    model: nn.Module,
    model_dict: Mapping[str, Any],
    optimizer: Optimizer | None,
    optimizer_dict: Mapping[str, Any] | None,
    progress: Mapping[str, int | float | str],
) -> CheckpointState:
    properties = {f"training.{name}": value for name, value in progress.items()}
    if isinstance(model, TrainingGraph):
        state = model.checkpoint(optimizer if isinstance(optimizer, GraphOptimizer) else None, properties=properties)
        if isinstance(optimizer, GraphOptimizer):
            return state
    else:
        learnt = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
        tensors = {name: value for name, value in model_dict.items() if isinstance(value, torch.Tensor)}
        state = CheckpointState(
            {name: value.detach() for name, value in tensors.items() if name in learnt},
            {name: value.detach() for name, value in tensors.items() if name not in learnt},
            properties=properties,
        )
    if optimizer_dict is not None and _as_ort_has_it(optimizer_dict, state):
        for number, group in enumerate(optimizer_dict["param_groups"]):
            members = {name: optimizer_dict["state"].get(name, {}) for name in group["params"]}
            state.optimizer[f"group{number}"] = group_from_torch(group, members)
    return state


def _as_ort_has_it(optimizer_dict: Mapping[str, Any], state: CheckpointState) -> bool:
    """Whether an ORT checkpoint can hold these moments (Adam's and SGD's); others are only in `training.safetensors`."""
    for name, states in optimizer_dict["state"].items():
        parameter = state.trainable.get(name)
        for key, value in states.items():
            if key == "step" or value is None:
                continue
            fits = isinstance(value, torch.Tensor) and parameter is not None and value.shape == parameter.shape
            if key not in TO_ORT_MOMENTS or not fits:
                return False
    return all(isinstance(group.get("lr"), (int, float, torch.Tensor)) for group in optimizer_dict["param_groups"])


# Gradients of an open accumulation window


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    if is_sharded(model):
        raise CheckpointError("FSDP gives no access to partially accumulated gradients", remedy="Save when a window is complete.")
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _set_gradients(model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for name, value in gradients.items():
        parameters[name].grad = value.to(parameters[name].device, copy=True)
