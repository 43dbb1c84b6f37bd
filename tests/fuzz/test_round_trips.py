"""Odd states through every writable format: each comes back equal, or is refused, or a warning says what changed."""

from __future__ import annotations

import dataclasses
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt.checkpoint.names import joined_aliases, split_aliases
from torch_ort_ckpt.checkpoint.state import is_string, same_tensor
from torch_ort_ckpt.dtypes import ONNX_FROM_TORCH
from torch_ort_ckpt.formats.ort.groups import merge

from .states import odd_state

PARTS = 10


def states_per_part(ordinary: int) -> int:
    """States for one of the `PARTS` tests: `ordinary` in all, or as many as TOC_FUZZ_STATES says."""
    return -(-int(os.environ.get("TOC_FUZZ_STATES", ordinary)) // PARTS)


def as_it_was(state: toc.CheckpointState) -> toc.CheckpointState:
    return state


def without_values(state: toc.CheckpointState) -> toc.CheckpointState:
    """What a nominal checkpoint keeps of its parameters."""
    if state.nominal:
        for home in (state.trainable, state.frozen, state.mixed_precision):
            for name, value in home.items():
                home[name] = np.array("", dtype=object) if is_string(value) else torch.empty((), dtype=value.dtype, device="meta")
    return state


def merged(state: toc.CheckpointState) -> toc.CheckpointState:
    return merge(without_values(state)) if len(state.optimizer) > 1 else without_values(state)


def weights(state: toc.CheckpointState) -> toc.CheckpointState:
    """Weights alone, as somebody else's file of weights reads."""
    found = toc.CheckpointState()
    for name, value in {**state.parameters, **joined_aliases(state)}.items():
        (found.trainable if not is_string(value) and value.is_floating_point() else found.frozen)[name] = value
    return split_aliases(found)


def without_optimizer(state: toc.CheckpointState) -> toc.CheckpointState:
    return dataclasses.replace(state, optimizer={})


@dataclass(frozen=True)
class Variant:
    """A format with options. `kept` gives what must be left of a state where a warning says that not all of it is; `of` what is saved."""

    format: str
    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    kept: Callable[[toc.CheckpointState], toc.CheckpointState] = as_it_was
    of: Callable[[toc.CheckpointState], toc.CheckpointState] = as_it_was
    asked: bool = False
    """Whether its options ask for `kept` outright."""


VARIANTS = {
    "ort": Variant("ort", "checkpoint", {}, without_values),
    "ort v1": Variant("ort", "checkpoint", {"version": 1}, without_values),
    "ort external": Variant("ort", "checkpoint", {"external_data": True}),
    "ort keep": Variant("ort", "checkpoint", {"groups": "keep"}, without_values),
    "ort keep v1": Variant("ort", "checkpoint", {"groups": "keep", "version": 1}),
    "ort merge": Variant("ort", "checkpoint", {"groups": "merge"}, merged, asked=True),
    "safetensors": Variant("safetensors", "checkpoint.safetensors"),
    "safetensors folder": Variant("safetensors", "checkpoint"),
    "safetensors sharded": Variant("safetensors", "checkpoint", {"max_shard_size": 64}),
    "torch": Variant("torch", "checkpoint.pt"),
    "torch bare": Variant("torch", "checkpoint.pt", {"bare": True}, weights, without_optimizer),
    "pbseq": Variant("pbseq", "checkpoint"),
    "pbseq keep": Variant("pbseq", "checkpoint", {"groups": "keep"}),
    "pbseq merge": Variant("pbseq", "checkpoint", {"groups": "merge"}, merged, asked=True),
    "runner": Variant("runner", "checkpoint"),
    "ortcp": Variant("ortcp", "checkpoint.ortcp"),
    "onnx": Variant("onnx", "checkpoint.onnx", {}, weights),
    "onnx external": Variant("onnx", "checkpoint.onnx", {"external_data": True}, weights),
    "dcp": Variant("dcp", "checkpoint"),
}
REFUSED, EQUAL, WARNED = "refused", "equal", "warned"


def outcome(state: toc.CheckpointState, variant: Variant, folder: Path) -> str:
    """Save and load; raises `AssertionError` if something changed without a warning."""
    state = variant.of(state)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = folder / variant.name
    before = snapshot(state)
    if variant.format == "onnx" and not write_model(state, path):
        return REFUSED
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            toc.save(state, path, format=variant.format, include_mixed_precision=True, durable=False, **variant.options)
        except toc.CheckpointError as error:
            str(error).encode()  # printable anywhere
            return REFUSED
        finally:
            assert not differences(before, state), f"saving changed the state it was given: {differences(before, state)}"
        told = [warning for warning in caught if issubclass(warning.category, toc.CheckpointWarning)]
        again = toc.load(path)
        loud = [str(warning.message) for warning in caught[len(told) :] if issubclass(warning.category, toc.CheckpointWarning)]
    assert not loud, f"loading what was saved warns: {loud}"
    assert toc.detect(path) == variant.format
    changed = differences(state, again)
    if not changed:
        return EQUAL
    assert told or variant.asked, f"changed without a word: {changed}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", toc.CheckpointWarning)
        expected = snapshot(state)
        expected.refresh_mixed_precision()
        expected = variant.kept(expected)
    more = differences(expected, again)
    assert not more, f"changed beyond what was said ({[str(warning.message) for warning in told]}): {more}"
    return WARNED


def snapshot(state: toc.CheckpointState) -> toc.CheckpointState:
    """A copy of all but the tensors themselves."""
    groups = {}
    for name, group in state.optimizer.items():
        states = {param: dict(moments) for param, moments in group.states.items()}
        groups[name] = dataclasses.replace(group, states=states, hyperparameters=dict(group.hyperparameters))
    parts = {key: dict(getattr(state, key)) for key in ("trainable", "frozen", "properties", "mixed_precision", "partitions")}
    return dataclasses.replace(state, optimizer=groups, **parts)


def differences(a: toc.CheckpointState, b: toc.CheckpointState) -> list[str]:
    """Stricter than `==`: types of numbers, tuples and lists count too."""
    found = [f"nominal: {a.nominal}, {b.nominal}"] if a.nominal != b.nominal else []
    for kind in ("trainable", "frozen", "mixed_precision"):
        found += _tensor_differences(kind, getattr(a, kind), getattr(b, kind))
    for kind in ("properties", "partitions"):
        found += _plain_differences(kind, getattr(a, kind), getattr(b, kind))
    found += _plain_differences("groups", dict.fromkeys(a.optimizer), dict.fromkeys(b.optimizer))
    for name in a.optimizer.keys() & b.optimizer.keys():
        first, second = a.optimizer[name], b.optimizer[name]
        for key in ("step", "initial_lr", "lr", "hyperparameters"):
            found += _plain_differences(f"{name}.{key}", getattr(first, key), getattr(second, key))
        found += _plain_differences(f"{name}.states", dict.fromkeys(first.states), dict.fromkeys(second.states))
        for param in first.states.keys() & second.states.keys():
            found += _tensor_differences(f"{name}/{param}", first.states[param], second.states[param])
    return [text[:300] for text in found]


def _tensor_differences(where: str, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    if a.keys() != b.keys():
        return [f"{where}: {sorted(a)} {sorted(b)}"]
    return [f"{where}/{name}: {_described(a[name])}, {_described(b[name])}" for name in a if not same_tensor(a[name], b[name])]


def _described(value: Any) -> str:
    return repr(value.tolist()) if is_string(value) else f"{value.dtype} {tuple(value.shape)}"


def _plain_differences(where: str, a: Any, b: Any) -> list[str]:
    return [] if _same(a, b) else [f"{where}: {a!r}, {b!r}"]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.floating) and isinstance(b, float):
        a, b = float(a), float(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float):
        return a.hex() == b.hex()
    return same_tensor(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def write_model(state: toc.CheckpointState, path: Path) -> bool:
    """A model with an initializer for every weight and alias, to be written into; False where ONNX can't have one."""
    values = {**state.parameters}
    for name, alias in state.mixed_precision.items():
        values[f"{name}_{'fp16' if alias.dtype == torch.float16 else 'bf16'}"] = alias
    model = onnx.ModelProto(ir_version=8, graph=onnx.GraphProto(name="odd"))
    try:
        for name, value in values.items():
            number = onnx.TensorProto.STRING if is_string(value) else ONNX_FROM_TORCH[value.dtype]
            model.graph.initializer.append(onnx.TensorProto(name=name, dims=value.shape, data_type=number))
    except (KeyError, UnicodeEncodeError, ValueError):
        return False
    path.write_bytes(model.SerializeToString())
    return True


@pytest.mark.parametrize("part", range(PARTS))
def test_odd_states_come_back_equal_or_are_refused_or_warned_about(part: int, tmp_path: Path) -> None:
    counts: dict[str, Counter[str]] = {name: Counter() for name in VARIANTS}
    for number in range(states_per_part(120)):
        state = odd_state(part, number)
        for name, variant in VARIANTS.items():
            try:
                counts[name][outcome(state, variant, tmp_path / "case")] += 1
            except Exception as error:
                raise AssertionError(f"{name}, state {number} of seed {part}: {type(error).__name__}: {error}") from error
    for name, count in counts.items():
        print(f"{name}: {count.total()} states, {', '.join(f'{count[kind]} {kind}' for kind in (EQUAL, REFUSED, WARNED))}")
        assert count[EQUAL] + count[WARNED] > count.total() // 5 or count.total() < 100, f"{name} refuses nearly everything"
