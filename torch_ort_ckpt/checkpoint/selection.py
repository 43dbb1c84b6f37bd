"""Parts of a state, and states on other devices: `load(only=)` and `load(device=)`."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from ..errors import CheckpointError
from ..storage.paths import PathLike
from ..storage.tensors import memory_key
from .backing import backed_by
from .state import CheckpointState, Value, did_you_mean, is_string

_T = TypeVar("_T")


def selected(state: CheckpointState, only: str | Sequence[str], path: PathLike | None = None) -> CheckpointState:
    """The parameters that `only` names, with their moments, aliases and partitions. Properties, steps and rates stay as they are.

    Each item is a name or a pattern of `fnmatch` ("encoder.*"). One that matches nothing is an error.
    """
    known = dict.fromkeys([*state.parameters, *state.mixed_precision])
    for group in state.optimizer.values():
        known |= dict.fromkeys(group.states)
    wanted: set[str] = set()
    for item in [only] if isinstance(only, str) else only:
        found = [item] if item in known else [name for name in known if isinstance(item, str) and fnmatch.fnmatchcase(name, item)]
        if not found:
            raise CheckpointError(
                f"only= matches no parameter: {item!r}{did_you_mean(item, known)}",
                path=path,
                remedy="Use names of parameters, or patterns such as 'encoder.*'.",
            )
        wanted.update(found)

    def kept(values: Mapping[str, _T]) -> dict[str, _T]:
        return {name: value for name, value in values.items() if name in wanted}

    return dataclasses.replace(
        state,
        trainable=kept(state.trainable),
        frozen=kept(state.frozen),
        mixed_precision=kept(state.mixed_precision),
        partitions=kept(state.partitions),
        optimizer={name: dataclasses.replace(group, states=kept(group.states)) for name, group in state.optimizer.items()},
    )


def usable_device(device: torch.device | str | int) -> torch.device:
    """The device, after a first (empty) tensor on it: a device that is not there fails before a file is read."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"device {device!r} can't be used ({reason})", remedy="Use 'cpu', or a device of this machine.") from error


def on_device(state: CheckpointState, device: torch.device) -> CheckpointState:
    """The state with its tensors on this device. Those that are there already are not copied, tied ones stay tied.

    String tensors and the parameters of a nominal state have no values to move.
    """
    moved: dict[Any, torch.Tensor] = {}

    def one(value: Value) -> Value:
        if is_string(value) or value.is_meta or value.device == device:
            return value
        key = memory_key(value)
        if key not in moved:
            moved[key] = value.to(device)
        return moved[key]

    def many(values: Mapping[str, Value]) -> dict[str, Value]:
        return {name: one(value) for name, value in values.items()}

    def states(values: Mapping[str, Mapping[str, Value]]) -> dict[str, dict[str, Value]]:
        return {name: many(moments) for name, moments in values.items()}

    there = dataclasses.replace(
        state,
        trainable=many(state.trainable),
        frozen=many(state.frozen),
        mixed_precision=many(state.mixed_precision),
        optimizer={name: dataclasses.replace(group, states=states(group.states)) for name, group in state.optimizer.items()},
    )
    return backed_by(there, ()) if moved else there
