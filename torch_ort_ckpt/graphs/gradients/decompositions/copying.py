"""Copies and new tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .registry import after

aten = torch.ops.aten


@after(aten.copy.default)
def copy(x: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """With the type and the shape of `x`: ONNX's translation does not broadcast."""
    return src.to(x.dtype).expand(x.shape).clone()


@after(aten.empty_permuted.default)
def empty_permuted(
    size: Sequence[Any],
    physical_layout: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """Zeros: ONNX has no memory that was not written, and no strides."""
    return torch.zeros(list(size), dtype=dtype, device=device)
