"""Optimizer groups as ORT's loader needs them, and back.

Measured on ORT 1.19.2: it looks only in `group0`, under the moment names of its own optimizers, and requires an entry with every moment
for every trainable parameter, or no entry at all (then moments start as zeros and the step is kept). A group of another name is
silently ignored.
So on the way out one group is renamed to `group0` and missing moments are written as zeros; a note in our own properties undoes that on
the way in, unless ORT has continued training in between.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ...checkpoint.state import CheckpointState, OptimizerGroup, is_string
from ...errors import CheckpointError, UnsupportedError
from ...storage.files import warn
from ...storage.paths import PathLike
from ..plain import decode_number, encode_number

ORT_GROUP = "group0"


def prepare(state: CheckpointState, path: PathLike, policy: str) -> tuple[CheckpointState, dict[str, dict[str, Any]]]:
    """The state with groups ORT can train from, and per group a note of what was changed.

    `policy` for several groups: "single" refuses, "merge" folds them into one, "keep" writes them as they are.
    """
    if policy not in ("single", "merge", "keep"):
        raise CheckpointError(f"groups={policy!r}", path=path, remedy='Use "single", "merge" or "keep".')
    for name, group in state.optimizer.items():
        if not -(1 << 63) <= group.step < 1 << 63:
            raise UnsupportedError("step beyond 64 bits", path=path, field=f"optimizer/{name}")
    if policy == "keep" or not state.optimizer:
        return state, {}
    if len(state.optimizer) > 1:
        if policy == "single":
            raise UnsupportedError(
                f"ORT trains with one optimizer group, this state has {len(state.optimizer)} ({', '.join(sorted(state.optimizer)[:5])})",
                path=path,
                field="optimizer",
                remedy='Pass groups="merge" to fold them into one, or groups="keep" for a file that ORT loads but does not train from.',
            )
        state = merge(state)
    ((name, group),) = state.optimizer.items()
    note: dict[str, Any] = {} if name == ORT_GROUP else {"name": name}
    states = {param: dict(moments) for param, moments in group.states.items()}
    moments = sorted({moment for entry in states.values() for moment in entry if moment != "step"})
    if not moments:  # ORT refuses entries without moments
        if states:
            note["members"] = sorted(states)
        if steps := {
            param: encode_number(entry["step"], path, f"optimizer/{name}/{param}/step") for param, entry in states.items() if entry
        }:
            note["own_steps"] = steps
        states = {}
    else:
        filled = {param: None if param not in states else _missing(states[param], moments) for param in {*states, *state.trainable}}
        note_filled = {param: what for param, what in sorted(filled.items()) if what != []}
        for param in note_filled:
            entry = states.setdefault(param, {})
            for moment in _missing(entry, moments):
                entry[moment] = _zeros(state, param, path)
        if note_filled:
            note["filled"] = note_filled
    return dataclasses.replace(state, optimizer={ORT_GROUP: dataclasses.replace(group, states=states)}), {ORT_GROUP: note} if note else {}


def restore(state: CheckpointState, name: str, note: dict[str, Any], fresh: bool) -> None:
    """Undo `prepare` for one group (in place); what was filled or counted per weight is valid only while `fresh`."""
    group = state.optimizer[name]
    if fresh:
        for param, moments in dict(note.get("filled") or {}).items():
            if moments is None:
                group.states.pop(param, None)
            elif param in group.states:
                for moment in moments:
                    group.states[param].pop(moment, None)
        if not group.states:
            group.states = {param: {} for param in note.get("members") or ()}
            for param, step in dict(note.get("own_steps") or {}).items():
                group.states[param]["step"] = decode_number(step)
    else:
        for entry in group.states.values():
            entry.pop("step", None)
    original = note.get("name")
    if isinstance(original, str) and original not in state.optimizer:
        state.optimizer = {original if key == name else key: value for key, value in state.optimizer.items()}


def merge(state: CheckpointState) -> CheckpointState:
    """One group `group0` with every parameter's moments. Rates and hyper-parameters that differ can't be kept: a warning names them."""
    members = list(state.optimizer.values())
    first = members[0]
    merged = OptimizerGroup(max(group.step for group in members), first.initial_lr, first.lr)
    for group in members:
        for param, moments in group.states.items():
            if param in merged.states:
                raise UnsupportedError("in two optimizer groups", field=param, remedy="Give each parameter to one group.")
            merged.states[param] = dict(moments)
            if group.step != merged.step and moments and "step" not in moments:
                merged.states[param]["step"] = torch.tensor(group.step)
    keys = {key for group in members for key in group.hyperparameters}
    lost = sorted(key for key in keys if any(group.hyperparameters.get(key) != first.hyperparameters.get(key) for group in members))
    merged.hyperparameters = {key: value for key, value in first.hyperparameters.items() if key not in lost}
    lost += [key for key in ("lr", "initial_lr") if any(getattr(group, key) != getattr(first, key) for group in members)]
    if lost:
        warn(f"merging {len(members)} optimizer groups: {', '.join(lost)} differ; the rates of the first are kept, the rest is dropped")
    return dataclasses.replace(state, optimizer={ORT_GROUP: merged})


def _missing(entry: dict[str, Any], moments: list[str]) -> list[str]:
    return [moment for moment in moments if moment not in entry]


def _zeros(state: CheckpointState, param: str, path: PathLike) -> torch.Tensor:
    """Zeros of the parameter's shape that take no memory until they are written."""
    value = state.parameters.get(param)
    if value is None or is_string(value):
        raise UnsupportedError(
            "has moments missing and no parameter to take their shape from",
            path=path,
            field=f"optimizer/{param}",
            remedy='Pass groups="keep".',
        )
    return torch.zeros((), dtype=value.dtype).expand(value.shape)
