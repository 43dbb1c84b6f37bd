"""A training state in one safetensors file, as step models take it: `<parameter>.momentum0` next to `<parameter>`.

The step and the rate are texts of their own in the metadata, so that a client in any language changes them without parsing the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.state import CheckpointState
from ...errors import CorruptFileError, UnsupportedError

INLINE = "inline"
"""What the note says of the moments in such a file."""
COUNT = "accumulated.count"
"""How many batches the sums of gradients (`<parameter>.accumulated`) in such a file are of."""
STEP, RATE = "torch_ort_ckpt.step", "torch_ort_ckpt.lr"
_MAX_STEP = 2**63 - 1


def join_moments(state: CheckpointState, weights: Mapping[str, torch.Tensor], path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(all tensors of the file, moment's name in the file -> group, parameter, moment)."""
    if len(state.optimizer) > 1:
        raise UnsupportedError(
            f"{len(state.optimizer)} optimizer groups: a single file has one step and one rate",
            path=path,
            remedy="Save without single_file.",
        )
    tensors = dict(weights)
    keys: dict[str, Any] = {}
    for group_name, group in state.optimizer.items():
        for param, moments in sorted(group.states.items()):
            for moment, value in sorted(moments.items()):
                key = f"{param}.{moment}"
                if key in tensors:
                    raise UnsupportedError("the name of a weight and of a moment", path=path, field=key, remedy="Save without single_file.")
                assert isinstance(value, torch.Tensor)
                tensors[key], keys[key] = value, (group_name, param, moment)
    return tensors, keys


def texts_of(state: CheckpointState) -> dict[str, str]:
    """The step and the rate as metadata."""
    for group in state.optimizer.values():
        return {STEP: str(group.step)} | ({} if group.lr is None else {RATE: repr(float(group.lr))})
    return {}


def take_moments(tensors: dict[str, torch.Tensor], note: Mapping[str, Any]) -> dict[tuple[str, str, str], torch.Tensor]:
    """Take the moments out of the file's tensors."""
    found = {}
    for key, (group, param, moment) in note["keys"].items():
        found[str(group), str(param), str(moment)] = tensors.pop(key)
    return found


def drop_empty_sums(tensors: dict[str, torch.Tensor], note: Mapping[str, Any]) -> None:
    """Leave out the sums of gradients if they are of no batch: they are zeros, and no part of a model. Others stay as buffers."""
    names = [str(name) for name in note.get("accumulators", ())]
    if names and tensors[COUNT].shape == () and not tensors[COUNT].item():
        for name in names:
            del tensors[name]


def apply_texts(state: CheckpointState, metadata: Mapping[str, str], path: Path) -> None:
    """Set the step and the rate that the metadata has now: a client may have trained since the note was written."""
    for group in state.optimizer.values():
        if STEP in metadata:
            text = metadata[STEP]
            if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > _MAX_STEP:
                raise CorruptFileError("not a number of steps", path=path, field=STEP)
            group.step = int(text)
        if RATE in metadata:
            try:
                group.lr = float(metadata[RATE])
            except ValueError:
                group.lr = math.nan
            if not math.isfinite(group.lr):
                raise CorruptFileError("not a learning rate", path=path, field=RATE)
