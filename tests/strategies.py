"""Hypothesis strategies: any training state a format may be asked to hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from torch_ort_ckpt import CheckpointState, OptimizerGroup, PartitionInfo
from torch_ort_ckpt.dtypes import TORCH_FROM_ONNX

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)  # safetensors reserves this one
dtypes = st.sampled_from([dtype for dtype in TORCH_FROM_ONNX.values() if not dtype.is_complex])
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
properties = st.dictionaries(
    names,
    st.integers(-(1 << 63), (1 << 63) - 1) | st.floats().filter(lambda value: value == value) | st.text(max_size=20),
    max_size=4,
)


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Any bits at all: NaN payloads, infinities and denormals included."""
    dtype = dtype or draw(dtypes)
    shape = draw(shapes) if shape is None else shape
    count = int(np.prod(shape, dtype=np.int64))
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@st.composite
def string_tensors(draw: st.DrawFn) -> Any:
    shape = draw(shapes)
    count = int(np.prod(shape, dtype=np.int64))
    array = np.empty(count, dtype=object)
    array[:] = draw(st.lists(st.text(max_size=6), min_size=count, max_size=count))
    return array.reshape(shape)


@st.composite
def groups(draw: st.DrawFn, members: list[str], shapes_of: dict[str, tuple[int, ...]]) -> OptimizerGroup:
    moments = draw(st.sampled_from([(), ("momentum0",), ("momentum0", "momentum1")]))
    states: dict[str, dict[str, Any]] = {}
    for name in members:
        states[name] = {moment: draw(tensors(torch.float32, shapes_of[name])) for moment in moments if draw(st.integers(0, 9))}
        if states[name] and not draw(st.integers(0, 4)):
            states[name]["step"] = torch.tensor(draw(st.integers(0, 1000)))
    return OptimizerGroup(
        step=draw(st.integers(0, 1 << 40)),
        initial_lr=draw(st.floats(0, 10)),
        lr=draw(st.none() | st.floats(0, 10)),
        states=states,
        hyperparameters=draw(st.just({}) | st.fixed_dictionaries({"betas": st.just([0.9, 0.999]), "eps": st.floats(0, 1)})),
    )


@st.composite
def states(draw: st.DrawFn, *, several_groups: bool = False, strings: bool = True, mixed: bool = True) -> CheckpointState:
    chosen = draw(st.lists(names, max_size=6, unique=True))
    state = CheckpointState(properties=draw(properties))
    for name in chosen:
        if draw(st.booleans()):
            state.trainable[name] = draw(tensors(torch.float32) if draw(st.booleans()) else tensors())
        else:
            state.frozen[name] = draw(tensors() | string_tensors() if strings else tensors())
    masters = [name for name, value in state.trainable.items() if value.dtype == torch.float32]
    if mixed:
        for name in masters:
            if not draw(st.integers(0, 3)) and f"{name}_fp16" not in state.parameters:
                state.mixed_precision[name] = state.trainable[name].to(torch.float16)
    grouped: bool = draw(st.booleans())
    if masters and grouped:
        shapes_of = {name: tuple(state.trainable[name].shape) for name in masters}
        cut = draw(st.integers(0, len(masters))) if several_groups else len(masters)
        state.optimizer["group0"] = draw(groups(masters[:cut], shapes_of))
        if cut < len(masters):
            state.optimizer[draw(names.filter(lambda name: name != "group0"))] = draw(groups(masters[cut:], shapes_of))
    for name in masters[:2]:
        if not draw(st.integers(0, 3)):
            state.partitions[name] = PartitionInfo(tuple(state.trainable[name].shape), draw(st.integers(-1, 1)))
    return state
