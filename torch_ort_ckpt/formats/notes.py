"""What a plain container of named tensors (safetensors, `torch.save`) has no place for, as one JSON-able note beside the tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ..names import joined_aliases
from ..state import CheckpointState, OptimizerGroup, Value, is_string
from ..storage import PathLike, string_array
from . import extras


def describe(state: CheckpointState, path: PathLike) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(the weights and aliases by the names they have on disk, the note). Moments are not in either: the format places them."""
    aliases = joined_aliases(state)
    named = {**state.parameters, **aliases}
    strings = {name: value for name, value in named.items() if is_string(value)}
    note = {
        "version": 1,
        "nominal": state.nominal,
        "frozen": sorted(state.frozen),
        "strings": {name: {"shape": list(value.shape), "values": value.reshape(-1).tolist()} for name, value in strings.items()},
        "aliases": dict(zip(state.mixed_precision, aliases, strict=True)),
        "properties": extras.checked_properties(state, path),
        "partitions": {name: dataclasses.asdict(info) for name, info in state.partitions.items()},
        "optimizer": {
            name: {
                "step": group.step,
                "initial_lr": group.initial_lr,
                "lr": group.lr,
                "hyperparameters": group.hyperparameters,
                "members": sorted(group.states),
            }
            for name, group in state.optimizer.items()
        },
    }
    return {name: value for name, value in named.items() if name not in strings}, note


def rebuild(tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any], path: PathLike) -> CheckpointState:
    """The state that `describe` took apart, without moments. A malformed note raises what malformed data raises in Python."""
    values: dict[str, Value] = dict(tensors)
    for name, entry in note["strings"].items():
        values[name] = string_array([str(text) for text in entry["values"]], tuple(entry["shape"]))
    state = CheckpointState(nominal=bool(note["nominal"]), properties=dict(note["properties"]))
    state.mixed_precision = {base: values.pop(name) for base, name in note["aliases"].items()}
    frozen = set(note["frozen"])
    for name, value in values.items():
        (state.frozen if name in frozen else state.trainable)[name] = value
    state.partitions = {name: extras.partition_from_json(entry, path) for name, entry in note["partitions"].items()}
    for name, entry in note["optimizer"].items():
        settings = {key: entry[key] for key in ("step", "initial_lr", "lr", "hyperparameters")}
        state.optimizer[name] = OptimizerGroup(**settings, states={param: {} for param in entry["members"]})
    return state
