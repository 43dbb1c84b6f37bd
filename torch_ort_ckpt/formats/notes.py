"""What a plain container of named tensors (safetensors, `torch.save`) can't hold, as one JSON-able note next to the tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ..checkpoint.names import joined_aliases, same_aliases, split_aliases
from ..checkpoint.state import CheckpointState, OptimizerGroup, Value, is_string
from ..errors import UnsupportedError
from ..storage.files import string_array
from ..storage.paths import PathLike
from . import plain
from .ort import extras


def describe(state: CheckpointState, path: PathLike) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(the weights and aliases by the names they have on disk, the note). Moments are not in either: the format places them."""
    for name, group in state.optimizer.items():
        for param, moments in group.states.items():
            if text := sorted(moment for moment, value in moments.items() if is_string(value)):
                raise UnsupportedError(
                    "this format has no string tensors among moments", path=path, field=f"optimizer/{name}/{param}/{text[0]}"
                )
    aliases = joined_aliases(state)
    named = {**state.parameters, **aliases}
    strings = {name: value for name, value in named.items() if is_string(value)}
    note = {
        "version": 1,
        "nominal": state.nominal,
        "frozen": sorted(state.frozen),
        "strings": {
            name: {"shape": list(value.shape), "values": [str(text) for text in value.reshape(-1).tolist()]}
            for name, value in strings.items()
        },
        "aliases": dict(zip(state.mixed_precision, aliases, strict=True)),
        "properties": extras.checked_properties(state, path),
        "partitions": {name: dataclasses.asdict(info) for name, info in state.partitions.items()},
        "optimizer": {
            name: {
                "step": group.step,
                "initial_lr": float(group.initial_lr),
                "lr": None if group.lr is None else float(group.lr),
                "hyperparameters": plain.encode(group.hyperparameters, path, f"optimizer/{name}/hyperparameters"),
                "members": sorted(group.states),
            }
            for name, group in state.optimizer.items()
        },
    }
    return {name: value for name, value in named.items() if name not in strings}, note


def lost_with_weights_alone(state: CheckpointState) -> list[str]:
    """What a file of named weights, without a note, would not restore."""
    parts = {"optimizer state": state.optimizer, "properties": state.properties, "partitions": state.partitions}
    lost = [what for what, content in parts.items() if content]
    found = CheckpointState()
    for name, value in {**state.parameters, **joined_aliases(state)}.items():
        (found.trainable if not is_string(value) and value.is_floating_point() else found.frozen)[name] = value
    if not same_aliases(split_aliases(found), state):
        lost.append("which tensors are half-precision aliases")
    elif found.frozen.keys() != state.frozen.keys():
        lost.append("which weights are trained")
    return lost


def rebuild(tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any], path: PathLike) -> CheckpointState:
    """The state that `describe` took apart, without moments. A malformed note raises what malformed data raises in Python."""
    values: dict[str, Value] = dict(tensors)
    for name, entry in _of(note["strings"], dict).items():
        texts = [_of(text, str) for text in _of(_of(entry, dict)["values"], list)]
        values[_of(name, str)] = string_array(texts, tuple(_of(size, int) for size in _of(entry["shape"], list)))
    state = CheckpointState(nominal=_of(note["nominal"], bool))
    for name, value in _of(note["properties"], dict).items():
        state.properties[_of(name, str)] = _of(value, int, float, str)
    for base, name in _of(note["aliases"], dict).items():
        alias = _of(values.pop(_of(name, str)), torch.Tensor)
        if alias.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"{name} is not a half-precision alias")
        state.mixed_precision[_of(base, str)] = alias
    frozen = {_of(name, str) for name in _of(note["frozen"], list)}
    for name, value in values.items():
        (state.frozen if name in frozen else state.trainable)[name] = value
    for name, entry in _of(note["partitions"], dict).items():
        state.partitions[_of(name, str)] = extras.partition_from_json(_of(entry, dict), path)
    for name, entry in _of(note["optimizer"], dict).items():
        rate = _of(_of(entry, dict)["lr"], float, type(None))
        group = OptimizerGroup(_of(entry["step"], int), _of(entry["initial_lr"], float), rate)
        group.hyperparameters = _of(plain.decode(_of(entry["hyperparameters"], dict)), dict)
        group.states = {_of(param, str): {} for param in _of(entry["members"], list)}
        state.optimizer[_of(name, str)] = group
    return state


def _of(value: Any, *kinds: type) -> Any:
    """The value if it has exactly one of these types (a boolean is not an integer)."""
    if type(value) not in kinds and not (torch.Tensor in kinds and isinstance(value, torch.Tensor)):
        raise TypeError(f"expected {' or '.join(kind.__name__ for kind in kinds)}, not {type(value).__name__}")
    return value
