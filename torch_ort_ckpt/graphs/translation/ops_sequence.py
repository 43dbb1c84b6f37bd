"""Sequences: Python lists of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registry import Int, Ints, register_op


@register_op("SequenceEmpty")
def sequence_empty(*, dtype: torch.dtype = torch.float32) -> Any:
    return []


@register_op("SequenceConstruct")
def sequence_construct(*values: Tensor) -> Any:
    return list(values)


@register_op("SequenceInsert")
def sequence_insert(sequence: Any, value: Tensor, position: Int | None = None) -> Any:
    place = len(sequence) if position is None else position if isinstance(position, int) else position[0]
    return [*sequence[:place], value, *sequence[place:]]


@register_op("SequenceErase")
def sequence_erase(sequence: Any, position: Int = -1) -> Any:
    place = position % len(sequence)
    return [*sequence[:place], *sequence[place + 1 :]]


@register_op("SequenceAt")
def sequence_at(sequence: Any, position: Int) -> Any:
    return sequence[position]


@register_op("SequenceLength")
def sequence_length(sequence: Any, *, device: torch.device) -> Tensor:
    return torch.tensor(len(sequence), device=device)


@register_op("ConcatFromSequence")
def concat_from_sequence(sequence: Any, *, axis: int, new_axis: int = 0) -> Tensor:
    return torch.stack(sequence, axis) if new_axis else torch.cat(sequence, axis)


@register_op("SplitToSequence")
def split_to_sequence(x: Tensor, split: Ints | None = None, *, axis: int = 0, keepdims: int = 1) -> Any:
    if split is None:
        parts = torch.split(x, 1, axis)
        return list(parts) if keepdims else [part.squeeze(axis) for part in parts]
    return list(torch.split(x, split, axis))  # type: ignore[arg-type]  # one size for all parts is a number, not a list
