"""Optimizer state as ORTTrainer and TrainingRunner stored it, and a note for what their files can't hold.

Moments are `Moment_1`, `Moment_2`; Adam counts per weight (`Update_Count`), Lamb once for all (`Step`). Both are int64[1], start at 1
and hold the number of the next update: our `step` (updates done) is one less.

What that layout can't hold (other properties, learning rates, which weights are frozen) goes into one JSON note next to it:
`note` compares a state with what its file alone would restore, `restore` applies the difference.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...checkpoint import properties as names
from ...checkpoint.names import same_aliases
from ...checkpoint.state import CheckpointState, OptimizerGroup, Value, alias_name, is_string, same_number
from ...dtypes import HALF_SUFFIXES
from ...errors import CorruptFileError, UnsupportedError
from ...storage.paths import PathLike
from .. import plain
from ..ort.extras import checked_properties, dump_json, partition_from_json

GROUP = "group0"
NOTE = "torch_ort_ckpt"
"""Where the note is kept: a dataset or a property of this name."""

UPDATE_COUNT, SHARED_STEP = "Update_Count", "Step"
OURS = {"Moment_1": "momentum0", "Moment_2": "momentum1"}
THEIRS = {ours: theirs for theirs, ours in OURS.items()}

States = dict[str, dict[str, Value]]


def to_group(
    states: Mapping[str, Mapping[str, Value]], shared: Value | None, properties: Mapping[str, Any], path: PathLike
) -> OptimizerGroup:
    """A group from moments under ORT's names, per weight, and Lamb's shared step."""
    group = OptimizerGroup()
    counts: dict[str, int] = {}
    for param, moments in states.items():
        group.states[param] = {OURS.get(name, name): value for name, value in moments.items() if name != UPDATE_COUNT}
        if UPDATE_COUNT in moments:
            counts[param] = updates_done(moments[UPDATE_COUNT], path, f"{param}/{UPDATE_COUNT}")
    if shared is not None:
        group.step = updates_done(shared, path, SHARED_STEP)
    else:
        known = properties.get(names.WEIGHT_UPDATE_STEP, 0)
        group.step = max(counts.values(), default=known if isinstance(known, int) else 0)
    for param, step in counts.items():
        if step != group.step:
            group.states[param]["step"] = torch.tensor(step)
    return group


def from_group(group: OptimizerGroup, lamb: bool, path: PathLike) -> tuple[States, Value | None]:
    """Moments under ORT's names and, for Lamb, the shared step."""
    states: States = {}
    for param, moments in group.states.items():
        states[param] = {THEIRS.get(name, name): value for name, value in moments.items() if name != "step"}
        if taken := moments.keys() & {*OURS, UPDATE_COUNT}:
            raise UnsupportedError(
                f"a moment called {min(taken)!r}, which has another meaning in this format", path=path, field=f"{param}/{min(taken)}"
            )
        if not lamb or "step" in moments:
            states[param][UPDATE_COUNT] = _count(own_step(group, param, path), path, param)
    return states, _count(group.step, path, SHARED_STEP) if lamb else None


def updates_done(value: Value, path: PathLike, where: str) -> int:
    if is_string(value) or value.dtype != torch.int64 or value.numel() != 1 or int(value) < 1:
        raise CorruptFileError("not one int64 of at least 1, as the number of the next update must be", path=path, field=where)
    return int(value) - 1


def own_step(group: OptimizerGroup, param: str, path: PathLike | None = None) -> int:
    """The number of updates of this weight: its own `step` if it has one."""
    value = group.states[param].get("step")
    if value is None:
        return group.step
    if is_string(value) or value.numel() != 1 or not float(value).is_integer():
        raise UnsupportedError("a step that is not one whole number", path=path, field=f"{param}/step")
    return int(value)


def _count(step: int, path: PathLike, where: str) -> torch.Tensor:
    if not 0 <= step < (1 << 63) - 1:
        raise UnsupportedError(f"step {step}, where only 0 to 2**63 - 2 can be written", path=path, field=where)
    return torch.tensor([step + 1])


def only_group(state: CheckpointState, path: PathLike) -> OptimizerGroup | None:
    """The state's one group; these layouts have no more."""
    if len(state.optimizer) > 1:
        raise UnsupportedError(
            f"this format has one optimizer group, the state {len(state.optimizer)} ({', '.join(sorted(state.optimizer)[:5])})",
            path=path,
            field="optimizer",
            remedy="Fold them into one with torch_ort_ckpt.formats.groups.merge.",
        )
    return next(iter(state.optimizer.values()), None)


def check_plain(state: CheckpointState, path: PathLike) -> None:
    if state.nominal:
        raise UnsupportedError("this format has no nominal checkpoints", path=path, remedy="Complete the state first.")
    if both := state.trainable.keys() & state.frozen.keys():
        raise UnsupportedError("both trainable and frozen", path=path, field=min(both))


def note(inferred: CheckpointState, state: CheckpointState, path: PathLike) -> str | None:
    """What the file alone would not restore of `state`, as JSON; None if nothing."""
    content: dict[str, Any] = {}
    wanted = checked_properties(state, path)
    if inferred.properties.keys() != wanted.keys() or not all(same_number(inferred.properties[key], wanted[key]) for key in wanted):
        content["properties"] = wanted
    if not same_aliases(inferred, state):
        content["aliases"] = {name: alias_name(name, alias) for name, alias in sorted(state.mixed_precision.items())}
    if inferred.frozen.keys() != state.frozen.keys():
        content["frozen"] = sorted(state.frozen)
    if inferred.partitions != state.partitions:
        content["partitions"] = {name: dataclasses.asdict(info) for name, info in sorted(state.partitions.items())}
    optimizer = {name: _numbers(group, path) for name, group in state.optimizer.items()}
    if optimizer != {name: _numbers(group, path) for name, group in inferred.optimizer.items()}:
        content["optimizer"] = optimizer
    return dump_json(content, path, NOTE) if content else None


def restore(state: CheckpointState, text: str | None, path: PathLike) -> CheckpointState:
    """Restore what `note` recorded (in place)."""
    if text is None:
        return state
    try:
        content = json.loads(text)
        if "properties" in content:
            state.properties = {str(key): _property(value) for key, value in content["properties"].items()}
        if "aliases" in content:
            _set_aliases(state, content["aliases"])
        if "frozen" in content:
            _set_frozen(state, [str(name) for name in content["frozen"]])
        if "partitions" in content:
            state.partitions = {str(name): partition_from_json(entry, path) for name, entry in content["partitions"].items()}
        if "optimizer" in content:
            state.optimizer = _groups(content["optimizer"], state.optimizer.get(GROUP, OptimizerGroup()).states)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, RuntimeError, StopIteration) as error:
        raise CorruptFileError(f"malformed ({type(error).__name__}: {error})", path=path, field=NOTE) from error
    return state


def _numbers(group: OptimizerGroup, path: PathLike) -> dict[str, Any]:
    return {
        "step": group.step,
        "initial_lr": float(group.initial_lr),
        "lr": None if group.lr is None else float(group.lr),
        "hyperparameters": plain.encode(group.hyperparameters, path, "optimizer/hyperparameters"),
        "members": sorted(group.states),
        "own_steps": {
            param: plain.encode_number(states["step"], path, f"{param}/step")
            for param, states in sorted(group.states.items())
            if "step" in states
        },
    }


def _groups(entries: dict[str, Any], states: States) -> dict[str, OptimizerGroup]:
    groups = {}
    for name, entry in entries.items():
        lr = entry["lr"]
        group = OptimizerGroup(int(entry["step"]), float(entry["initial_lr"]), None if lr is None else float(lr))
        group.hyperparameters = dict(plain.decode(entry["hyperparameters"]))
        for param in entry["members"]:
            group.states[str(param)] = {moment: value for moment, value in states.get(param, {}).items() if moment != "step"}
        for param, step in entry["own_steps"].items():
            group.states[param]["step"] = plain.decode_number(step)
        if missing := states.keys() - group.states.keys():
            raise ValueError(f"no entry for {min(missing)}")
        groups[str(name)] = group
    return groups


def _set_aliases(state: CheckpointState, aliases: Any) -> None:
    """`aliases`: weight -> name of its alias; earlier files have a list of the weights only."""
    inferred = {name: alias_name(name, alias) for name, alias in state.mixed_precision.items()}
    if isinstance(aliases, list):
        known = {**state.parameters, **dict.fromkeys(inferred.values())}
        aliases = {
            name: inferred.get(name) or next(name + suffix for suffix in HALF_SUFFIXES if name + suffix in known) for name in aliases
        }
    for name, full in inferred.items():
        state.trainable[full] = state.mixed_precision.pop(name)
    for name, full in aliases.items():
        alias = state.trainable.pop(full) if full in state.trainable else state.frozen.pop(full)
        if is_string(alias) or alias_name(name, alias) != full:
            raise ValueError(f"no alias {full}")
        state.mixed_precision[name] = alias


def _set_frozen(state: CheckpointState, frozen: Iterable[str]) -> None:
    everything, wanted = state.parameters, set(frozen)
    if unknown := wanted - everything.keys():
        raise ValueError(f"no weight {min(unknown)}")
    state.trainable = {name: value for name, value in everything.items() if name not in wanted}
    state.frozen = {name: value for name, value in everything.items() if name in wanted}


def _property(value: Any) -> int | float | str:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"a property of type {type(value).__name__}")
    return value
