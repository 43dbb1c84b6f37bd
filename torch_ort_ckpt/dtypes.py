"""Element types: ONNX numbers (as stored in every ORT checkpoint) and their PyTorch equivalents."""

from __future__ import annotations

import torch

from .catalog import DTYPES

STRING = 8
"""The ONNX number of string tensors, the one type that PyTorch does not have (they are numpy object arrays here)."""

TORCH_FROM_ONNX: dict[int, torch.dtype] = {number: getattr(torch, name) for number, name in DTYPES.items()}
ONNX_FROM_TORCH: dict[torch.dtype, int] = {dtype: number for number, dtype in TORCH_FROM_ONNX.items()}

HALF_SUFFIXES: dict[str, torch.dtype] = {"_fp16": torch.float16, "_bf16": torch.bfloat16}
"""What ORT appends to a weight's name for its half-precision alias."""


def short_name(dtype: torch.dtype) -> str:
    """`float32` rather than `torch.float32`."""
    return str(dtype).removeprefix("torch.")


ALIASABLE = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool}
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
)
"""What DLPack carries between PyTorch and ONNX Runtime without a copy."""
