"""PyTorch tensors as OrtValues and back, without a copy. The only place where DLPack capsules are made and used.

ONNX Runtime 1.19.2 crashes on a capsule used twice, on a versioned capsule and on a tensor in place of one; and it ignores the negative or
conjugate bit of a view. This module rules all of these out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # documented, but not in its __all__

from ...dtypes import ALIASABLE, short_name
from ...errors import UnsupportedError

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def to_ort(tensor: torch.Tensor) -> Any:
    """An OrtValue on the tensor's memory, which it keeps alive. The tensor must be contiguous."""
    if not has_memory(tensor):
        raise without_memory(tensor)
    if tensor.dtype not in ALIASABLE:
        raise UnsupportedError(f"ONNX Runtime can't use tensors of {short_name(tensor.dtype)}", remedy="Convert it first.")
    if not tensor.is_contiguous():
        raise UnsupportedError("only contiguous tensors can be shared with ONNX Runtime", remedy="Call .contiguous() first.")
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is torch.bool:
        return _borrow()(to_dlpack(tensor.view(torch.uint8)), True)
    return _borrow()(to_dlpack(tensor), False)


def from_ort(value: Any, is_bool: bool = False) -> torch.Tensor:
    """A tensor on the OrtValue's memory, which it keeps alive. DLPack does not tell bool from uint8."""
    tensor = from_dlpack(value.to_dlpack())
    return tensor.view(torch.bool) if is_bool else tensor


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the values are at the tensor's `data_ptr`: not so for DTensors and other wrapper subclasses, which would crash ORT."""
    if type(tensor) in _PLAIN or tensor.numel() == 0:
        return True
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # a fake tensor has no address at all
        return False


def without_memory(tensor: torch.Tensor, field: str | None = None) -> UnsupportedError:
    return UnsupportedError(
        f"is a {type(tensor).__name__}: ONNX Runtime needs the whole tensor in the memory of this process",
        field=field,
        remedy='Use engine="torch" for FSDP2 and tensor parallelism.',
    )


def as_input(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it can be shared, else a contiguous copy."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


@functools.cache
def _borrow() -> Callable[[Any, bool], Any]:
    from onnxruntime.capi import _pybind_state as ort

    borrow: Callable[[Any, bool], Any] = ort.OrtValue.from_dlpack
    return borrow
