"""What ORT's files can't hold, stored in namespaced string properties, which ORT's loader preserves.

- `torch_ort_ckpt.optimizer`: JSON, group -> current learning rate, hyper-parameters, exact initial rate, notes of `groups.prepare`, and a
  witness of the training state it was true for.
- `torch_ort_ckpt.floats`: JSON, float properties that float32 (all that ORT stores) would round.
- `torch_ort_ckpt.partitions`: JSON, weight -> `PartitionInfo`.
- `torch_ort_ckpt.aliases`: JSON, weight -> the name of its half-precision alias, where names and shapes alone would give another result.

ORT may continue training and save them again: a learning rate whose witness no longer matches, or a float whose rounded value
has changed, is stale and dropped.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from ...checkpoint.names import joined_aliases, same_aliases, split_aliases
from ...checkpoint.state import CheckpointState, OptimizerGroup, PartitionInfo, alias_name, is_string, same_number, split_half_suffix
from ...errors import CheckpointError, CorruptFileError, UnsupportedError
from ...storage.paths import PathLike
from ...storage.tensors import byte_view
from .. import plain
from ..soundness import check_partition, is_shallow
from .groups import restore

PREFIX = "torch_ort_ckpt."


def pack(state: CheckpointState, path: PathLike, notes: Mapping[str, dict[str, Any]] | None = None) -> dict[str, int | float | str]:
    """The state's properties plus ours, as files with int64 / float32 / string properties hold them. `notes`: from `groups.prepare`."""
    properties = checked_properties(state, path)
    optimizer: dict[str, dict[str, Any]] = {}
    for name, group in state.optimizer.items():
        entry: dict[str, Any] = dict((notes or {}).get(name, {}))
        if group.lr is not None:
            entry["lr"] = float(group.lr)
        if group.hyperparameters:
            entry["hyperparameters"] = plain.encode(group.hyperparameters, path, f"optimizer/{name}/hyperparameters")
        if not same_number(to_float32(group.initial_lr), float(group.initial_lr)):
            entry["initial_lr"] = float(group.initial_lr)
        if entry or any("step" in states for states in group.states.values()):
            optimizer[name] = {**entry, "witness": _witness(state, group)}
    floats = {
        name: value
        for name, value in properties.items()
        if isinstance(value, float) and not same_number(to_float32(value), value) and not math.isnan(value)
    }
    partitions = {name: dataclasses.asdict(info) for name, info in state.partitions.items()}
    for key, content in (("optimizer", optimizer), ("floats", floats), ("partitions", partitions), ("aliases", _unusual_aliases(state))):
        if content:
            properties[PREFIX + key] = dump_json(content, path, key)
    return properties


def unpack(state: CheckpointState, path: PathLike) -> CheckpointState:
    """Move what `pack` added to `state.properties` back to its fields, and aliases out of the weights (in place)."""
    _take_aliases(state, path)
    optimizer = _take(state, "optimizer", path)
    floats = _take(state, "floats", path)
    partitions = _take(state, "partitions", path)
    for name, entry in optimizer.items():
        group = state.optimizer.get(name)
        if group is None:
            continue
        if not isinstance(entry, dict):
            raise CorruptFileError("expected a JSON object", path=path, field=f"{PREFIX}optimizer/{name}")
        fresh = entry.get("witness") == _witness(state, group)
        if fresh:
            group.lr = _number(entry.get("lr"))
        exact = _number(entry.get("initial_lr"))
        if exact is not None and same_number(to_float32(exact), float(group.initial_lr)):
            group.initial_lr = exact
        try:
            if isinstance(entry.get("hyperparameters"), dict):
                group.hyperparameters = plain.decode(entry["hyperparameters"])
            restore(state, name, entry, fresh)
        except (TypeError, ValueError, AttributeError, KeyError, StopIteration, OverflowError, RuntimeError) as error:
            raise CorruptFileError(f"unreadable note ({error})", path=path, field=f"{PREFIX}optimizer/{name}") from error
    for name, value in floats.items():
        rounded = state.properties.get(name)
        if isinstance(value, float) and isinstance(rounded, float) and same_number(to_float32(value), rounded):
            state.properties[name] = value
    for name, entry in partitions.items():
        state.partitions[name] = partition_from_json(entry, path)
    return state


def _unusual_aliases(state: CheckpointState) -> dict[str, dict[str, str]]:
    """`{"of": {weight: its alias's name in the file}}`, if `split_aliases` would not find exactly these."""
    named = joined_aliases(state)
    if state.nominal:  # the file has no shapes to recognize an alias by
        same = not named and not any(split_half_suffix(name)[1] for name in state.parameters)
    else:
        found = split_aliases(CheckpointState(dict(state.trainable), {**state.frozen, **named}, properties=state.properties))
        same = same_aliases(found, state)
    return {} if same else {"of": dict(zip(state.mixed_precision, named, strict=True))}


def _take_aliases(state: CheckpointState, path: PathLike) -> None:
    note = _take(state, "aliases", path)
    if not note:
        split_aliases(state)
        return
    try:
        for name, full in note["of"].items():
            home = state.frozen if full in state.frozen else state.trainable
            if full in home:
                if is_string(home[full]) or alias_name(name, home[full]) != full:
                    raise ValueError(f"{full} is not an alias of {name}")
                state.mixed_precision[name] = home.pop(full)
    except (KeyError, AttributeError, TypeError, ValueError, CheckpointError) as error:
        raise CorruptFileError(f"malformed ({error})", path=path, field=f"{PREFIX}aliases") from error


def _witness(state: CheckpointState, group: OptimizerGroup) -> str:
    """Changes when training continues: the step and the first bytes of the first trainable weight (one page of the file)."""
    text = str(group.step).encode()
    for _, value in sorted(state.trainable.items()) if not state.nominal else ():
        if not is_string(value) and not value.is_meta and value.numel():
            text += bytes(byte_view(value.reshape(-1)[:16].cpu()).numpy())
            break
    return f"{zlib.crc32(text):08x}"


def checked_properties(state: CheckpointState, path: PathLike) -> dict[str, int | float | str]:
    """A copy of the properties after checking that every ORT format can hold them."""
    result: dict[str, int | float | str] = {}
    for name, value in state.properties.items():
        where = f"properties/{name}"
        if not isinstance(name, str) or name.startswith(PREFIX):
            raise UnsupportedError(f"names starting with {PREFIX!r} are reserved", path=path, field=where, remedy="Choose another name.")
        for kind in (int, float, str):  # a boolean is an integer, and a float of numpy a float
            if isinstance(value, kind):
                value = kind(value)
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise UnsupportedError("an integer beyond 64 bits", path=path, field=where, remedy="Store it as a string.")
        if not isinstance(value, (int, float, str)):
            raise UnsupportedError(
                f"a property must be int, float or str, not {type(value).__name__}",
                path=path,
                field=where,
                remedy="Store it as text, for example with json.dumps.",
            )
        result[name] = value
    return result


def to_float32(value: float) -> float:
    """The value rounded to float32; too large becomes infinite, as in ORT."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def dump_json(content: Any, path: PathLike, field: str) -> str:
    try:
        return json.dumps(content, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedError(f"holds something that is not plain data ({error})", path=path, field=field) from error


def partition_from_json(entry: Any, path: PathLike) -> PartitionInfo:
    try:
        values = {key: entry[key] for key in (item.name for item in dataclasses.fields(PartitionInfo)) if key in entry}
        info = PartitionInfo(**{**values, "original_dim": tuple(values["original_dim"])})
        check_partition(info)
        if not all(type(number) is int for number in info.original_dim):
            raise TypeError("not integers")
        return info
    except (TypeError, KeyError, ValueError, OverflowError, AttributeError) as error:
        raise CorruptFileError(f"unreadable partition information ({error})", path=path, field="partitions") from error


def _take(state: CheckpointState, key: str, path: PathLike) -> dict[str, Any]:
    text = state.properties.pop(PREFIX + key, None)
    if text is None:
        return {}
    try:
        content = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not is_shallow(content):
        raise CorruptFileError("expected a JSON object", path=path, field=PREFIX + key)
    return content


def _number(value: Any) -> float | None:
    """JSON has integers that no float can hold."""
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return None
