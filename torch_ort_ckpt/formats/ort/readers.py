"""Which releases of ORT read a checkpoint as it is, and why not the others.

Tried on ORT 1.15.1, 1.16.3, 1.17.3, 1.18.0 and 1.19.2, whose rules are the same but for the element types: a parameter must have a name.
Its optimizer takes the moments from `group0` alone. Where that group has states at all, every trainable parameter needs one, with every
moment that the optimizer keeps, in float32 and in the parameter's shape.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...checkpoint import properties as names
from ...checkpoint.state import CheckpointState, Value, is_string, split_half_suffix
from ...dtypes import short_name
from ...errors import printable
from .groups import ORT_GROUP

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
REFUSED_BY_ORT = (torch.float16, torch.bfloat16, *_FLOAT8)
"""What the loader of ORT 1.16 to 1.19 refuses, string tensors besides, though its own artifacts may hold them."""
REFUSED_BY_PBSEQ = _FLOAT8
"""What the loader of ORT 1.15 refuses; a string tensor crashes the process."""


def read_by(state: CheckpointState, releases: str, refused: tuple[torch.dtype, ...]) -> str:
    """The result for a state *as stored in the file*: aliases among the weights, groups as they were written."""
    if (why := _refusal(state, refused)) is not None:
        return f"no release of ORT: {why}"
    if names.WORLD_RANK in state.properties:
        return f"{releases}, but not to train from: it is one rank of a set (merge it first)"
    if (why := _optimizer_refusal(state)) is not None:
        return f"{releases}, but not to train from: {why}"
    others = sorted(state.optimizer.keys() - {ORT_GROUP})
    if others and ORT_GROUP not in state.optimizer:
        return f"{releases}, with its moments ignored: no optimizer group is called {ORT_GROUP}"
    if others:
        return f"{releases}, which train with {ORT_GROUP} only and carry {_quoted(others[0])} along"
    return releases


def _refusal(state: CheckpointState, refused: tuple[torch.dtype, ...]) -> str | None:
    """Why no loader accepts it. The parameters of a nominal checkpoint have no bytes: there the loader does not check their type."""
    if "" in state.parameters:
        return "a parameter has no name"
    for name, value in state.parameters.items():
        if is_string(value):
            return f"{_quoted(name)} is a string tensor"
        if value.dtype in refused and not state.nominal:
            alias = ", a half-precision alias" if split_half_suffix(name)[0] in state.parameters.keys() - {name} else ""
            return f"{_quoted(name)} is {short_name(value.dtype)}{alias}"
    for group_name, group in state.optimizer.items():
        for param, moments in group.states.items():
            for moment, value in moments.items():
                if is_string(value) or value.dtype in refused:
                    kind = "a string tensor" if is_string(value) else short_name(value.dtype)
                    return f"{moment} of {_quoted(param)} in {_quoted(group_name)} is {kind}"
    return None


def _optimizer_refusal(state: CheckpointState) -> str | None:
    group = state.optimizer.get(ORT_GROUP)
    if group is None or not group.states:
        return None
    kept = {"momentum0"} | {moment for states in group.states.values() for moment in states if moment.startswith("momentum")}
    for param, value in state.trainable.items():
        states: Mapping[str, Value] | None = group.states.get(param)
        if states is None:
            return f"{ORT_GROUP} has no state for {_quoted(param)}"
        for moment in sorted(kept):
            if moment not in states:
                return f"{_quoted(param)} has no {moment} in {ORT_GROUP}"
            if states[moment].dtype != torch.float32:
                return f"{moment} of {_quoted(param)} is {short_name(states[moment].dtype)}, not float32"
            if len(kept) > 1 and states[moment].shape != value.shape and not state.nominal:  # SGD never reads its moment
                return f"{moment} of {_quoted(param)} has another shape than the parameter"
    return None


def _quoted(name: str) -> str:
    return f"'{printable(name)}'"
