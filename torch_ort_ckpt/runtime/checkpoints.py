"""A live model as a `CheckpointState` and back: parameters, moments, learning rate, scheduler, step and dropout's RNG position."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ..checkpoint.bridge import from_torch, to_optimizer_state_dict
from ..checkpoint.state import CheckpointState, OptimizerGroup
from ..checkpoint.training_graph import GraphOptimizer
from ..errors import CheckpointError, UnsupportedError
from ..storage.files import warn
from ..storage.paths import PathLike

if TYPE_CHECKING:
    from .module import OrtModule

SEED, DRAWS, SCHEDULER = "runtime.seed", "runtime.draws", "runtime.scheduler"
"""Properties for what ORT's checkpoint format has no field for."""


def take(
    model: OrtModule, optimizer: Optimizer | None, scheduler: Any, properties: Mapping[str, int | float | str] | None
) -> CheckpointState:
    """The current state. Tensors are not copied: save it, or `clone()` it, before training continues."""
    table = model._table
    tensors = {name: tensor.detach() for name, tensor in model.named_tensors().items()}
    if optimizer is not None:
        table.refuse_computed(model.artifacts.trainable)
    if model.nominal:
        if table.partly_filled:
            table.require_values()
        tensors = {name: torch.empty((), dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    own: dict[str, int | float | str] = {}
    if model.artifacts.random:
        own |= {SEED: model.seed, DRAWS: model.draws}
    if scheduler is not None:
        own[SCHEDULER] = _scheduler_text(scheduler)
    return CheckpointState(
        trainable={name: tensors[name] for name in table.trainable},
        frozen={**{name: tensors[name] for name in table.frozen}, **table.strings},
        optimizer=_groups(model, optimizer),
        properties={**table.properties, **own, **(properties or {})},
        mixed_precision={name: tensors[name].to(dtype) for name, dtype in table.half_precision.items()},
        partitions=dict(table.partitions),
        nominal=model.nominal,
    )


def _groups(model: OrtModule, optimizer: Optimizer | None) -> dict[str, OptimizerGroup]:
    if optimizer is None:
        return {}
    return optimizer.groups() if isinstance(optimizer, GraphOptimizer) else from_torch(model, optimizer).optimizer


@torch.no_grad()
def restore(
    model: OrtModule, source: CheckpointState | PathLike, optimizer: Optimizer | None, scheduler: Any, *, strict: bool = True
) -> None:
    """Copy a state into the tensors of the model and the optimizer. Everything is checked before anything changes."""
    from ..formats import load

    state = source if isinstance(source, CheckpointState) else load(source)
    if state.nominal:
        raise CheckpointError("a nominal checkpoint has no values", remedy="Load the complete one.")
    targets = model.named_tensors()
    values = {name: value for name, value in state.parameters.items() if isinstance(value, torch.Tensor)}
    missing = sorted(targets.keys() - values.keys())
    unknown = sorted(values.keys() - targets.keys())
    if strict and (missing or unknown):
        raise CheckpointError(
            f"the checkpoint does not fit the model: missing {missing[:5]}, unknown {unknown[:5]}",
            remedy="Check that it belongs to these artifacts, or pass strict=False to load what fits.",
        )
    fitting = {name: value for name, value in values.items() if name in targets}
    check_fit(fitting, targets)
    model._table.refuse_computed(fitting)
    if optimizer is not None and state.optimizer:
        if isinstance(optimizer, GraphOptimizer):
            optimizer.load_groups(state.optimizer)
        else:
            optimizer.load_state_dict(to_optimizer_state_dict(state, optimizer, module=model))
    elif optimizer is not None and optimizer.state:
        warn("the checkpoint holds no optimizer state: the optimizer keeps the moments and steps it has")
    elif optimizer is None:
        model._table.saved_moments.groups = dict(state.optimizer)
    for name, value in fitting.items():
        targets[name].copy_(value)
    model._table.partitions = dict(state.partitions)
    model._table.fill(fitting)
    restore_position(model, state, scheduler)


def check_fit(values: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    """Raise unless every value has its target's shape and element type."""
    for name, value in values.items():
        target = targets[name]
        if value.shape != target.shape or value.dtype != target.dtype:
            raise CheckpointError(
                f"is {value.dtype} {list(value.shape)}, the model's is {target.dtype} {list(target.shape)}",
                field=name,
                remedy="It belongs to another model.",
            )


def restore_position(model: OrtModule, state: CheckpointState, scheduler: Any) -> None:
    """Properties, dropout's seed and draws, and the scheduler."""
    model._table.properties = {name: value for name, value in state.properties.items() if name not in (SEED, DRAWS, SCHEDULER)}
    seed, draws = state.properties.get(SEED), state.properties.get(DRAWS)
    if isinstance(seed, int) and isinstance(draws, int):
        model.seed_dropout(seed, draws)
    text = state.properties.get(SCHEDULER)
    if scheduler is not None:
        if not isinstance(text, str):
            warn("the checkpoint holds no scheduler state: the scheduler stays as it is")
            return
        scheduler.load_state_dict(json.loads(text))


def _scheduler_text(scheduler: Any) -> str:
    content = scheduler.state_dict()
    try:
        return json.dumps(content)
    except TypeError as error:
        raise UnsupportedError(
            f"the state of {type(scheduler).__name__} is not plain data ({error})",
            remedy="Keep scheduler.state_dict() elsewhere (torch.save).",
        ) from error
