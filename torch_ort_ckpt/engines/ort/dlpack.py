"""PyTorch tensors as OrtValues and back, without a copy. The only place where DLPack capsules are made and used.

ONNX Runtime 1.19.2 crashes on a capsule used twice, on a versioned capsule and on a tensor in place of one; and it ignores the negative or
conjugate bit of a view. This module rules all of these out.

Stock builds before 1.21 have no DLPack: there an OrtValue is made on the address of the tensor's memory, which it does not keep alive.
`Binding` in `sessions` does, whatever the build.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # documented, but not in its __all__

from ...dtypes import ALIASABLE, TORCH_FROM_ONNX, short_name
from ...errors import UnsupportedError
from .build import installed

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def to_ort(tensor: torch.Tensor) -> Any:
    """An OrtValue on the tensor's memory, which it keeps alive if the build has DLPack. The tensor must be contiguous."""
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
    if not installed().dlpack:
        return _by_address(tensor)
    if tensor.dtype is torch.bool:
        return _borrow()(to_dlpack(tensor.view(torch.uint8)), True)
    return _borrow()(to_dlpack(tensor), False)


def from_ort(value: Any, is_bool: bool = False) -> torch.Tensor:
    """A tensor on the OrtValue's memory, which it keeps alive. DLPack does not tell bool from uint8."""
    if not installed().dlpack:
        return _on_address(value)
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


def _by_address(tensor: torch.Tensor) -> Any:
    from onnxruntime.capi import _pybind_state as ort

    if tensor.dtype is torch.bfloat16 or tensor.device.type != "cpu":
        what = "bfloat16" if tensor.device.type == "cpu" else "CUDA tensors"
        raise UnsupportedError(
            f"{installed()} can't share {what} with PyTorch: that needs DLPack, which stock builds have from 1.21",
            remedy="pip install --upgrade onnxruntime",
        )
    device = ort.OrtDevice(ort.OrtDevice.cpu(), ort.OrtDevice.default_memory(), 0)
    return ort.OrtValue.ortvalue_from_numpy(tensor.numpy(), device)


class _Lent:
    """Memory of an OrtValue, for numpy; keeps the OrtValue alive."""

    def __init__(self, value: Any, size: int) -> None:
        self._value = value
        self.__array_interface__ = {"data": (value.data_ptr(), False), "shape": (size,), "typestr": "|u1", "version": 3}


def _on_address(value: Any) -> torch.Tensor:
    dtype, shape = TORCH_FROM_ONNX[value.element_type()], tuple(value.shape())
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.asarray(_Lent(value, size))).view(dtype).view(shape)
