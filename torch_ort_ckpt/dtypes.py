"""Element types: ONNX numbers (as stored in every ORT checkpoint) and their PyTorch equivalents."""

from __future__ import annotations

import torch

STRING = 8
"""The ONNX number of string tensors, the one type PyTorch has no equal for (they are numpy object arrays here)."""

TORCH_FROM_ONNX: dict[int, torch.dtype] = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    4: torch.uint16,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    12: torch.uint32,
    13: torch.uint64,
    14: torch.complex64,
    15: torch.complex128,
    16: torch.bfloat16,
    17: torch.float8_e4m3fn,
    18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2,
    20: torch.float8_e5m2fnuz,
}
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
