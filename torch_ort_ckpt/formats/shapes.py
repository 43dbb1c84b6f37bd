"""How much a file may ask for: shapes whose product is taken safely, and tensors in proportion to the bytes on disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

MAX_RANK = 64
"""As many dimensions as numpy and PyTorch's operators take."""

MAX_GROWTH = 64
"""A checkpoint's tensors may be at most this many times as large as its files: tied weights and expanded tensors share their bytes."""

MAX_TIES = MAX_GROWTH // 2
"""Writers use the same bytes for at most this many tensors, so that what they write can be read."""

ALWAYS_ALLOWED = 64 << 20
"""Bytes of tensors that any file may have, however small it is."""


def element_count(shape: Sequence[Any]) -> int:
    """The product of a shape from a file; `ValueError` where it can't be a shape (a long list of large sizes would take minutes)."""
    if len(shape) > MAX_RANK:
        raise ValueError(f"{len(shape)} dimensions, more than the {MAX_RANK} that numpy can have")
    for size in shape:
        if type(size) is not int or size.bit_length() > 64:
            raise ValueError("a size that is not an integer of 64 bits")
        if size < 0:
            raise ValueError(f"negative size {size}")
    return math.prod(shape)


def growth_limit(size: int) -> int:
    """Bytes of tensors that files of this size may have."""
    return max(ALWAYS_ALLOWED, MAX_GROWTH * size)
