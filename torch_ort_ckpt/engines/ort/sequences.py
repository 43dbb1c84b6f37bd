"""Tensor sequences on memory that PyTorch owns, made by ONNX Runtime's C API.

ONNX Runtime's Python package creates sequences only from lists of numpy arrays, in every run; its C API can create one that is reused.
For 300 small parameters an update through the Python API takes 2.7 times as long, and a whole step 1.1 to 1.2 times; for a few large ones
there is no difference (`python -m benchmarks.private_names --names slot`). `ListRun` is the fallback through the public API.

The package exports no C API, but passes it to the execution providers it loads: `libonnxruntime_providers_shared` holds a pointer to the
provider host, whose first virtual function returns it. A sequence created there replaces the value of a Python OrtValue.

The functions are found by their slots in the table, which never change within a version of the API. The rest relies on the layout of one
release, the last one, and is tested on Linux: anywhere else `available()` is False, and so it is if the C API does not find the memory of
a tensor where PyTorch has it. `tests/engines/test_graph_updates.py` removes it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from .build import installed
from .dlpack import to_ort
from .memory import Piece

_RELEASE = b"1.19.2"
_API_VERSION = 19
_ORT_VALUE_BYTES = 24  # a shared pointer and a type
_FLOAT = 1
_SEQUENCE = 2
_DEVICE_ALLOCATOR, _DEFAULT_MEMORY = 0, 0

_CPU = torch.device("cpu")
_Pointer = ctypes.c_void_p
_Out = ctypes.POINTER(ctypes.c_void_p)


class _Base(ctypes.Structure):
    """OrtApiBase."""

    _fields_ = (
        ("get_api", ctypes.CFUNCTYPE(_Pointer, ctypes.c_uint32)),
        ("get_version", ctypes.CFUNCTYPE(ctypes.c_char_p)),
    )


class _Api:
    """The few functions used of OrtApi, by their fixed slots."""

    def __init__(self, table: int) -> None:
        self._table = table
        size, code = ctypes.c_size_t, ctypes.c_int
        self._message = self._function(2, ctypes.c_char_p, _Pointer)
        self._data = self._function(51, _Pointer, _Pointer, _Out)
        self._cpu = self._function(69, _Pointer, code, code, _Out)
        self._tensor = self._function(49, _Pointer, _Pointer, _Pointer, size, ctypes.POINTER(ctypes.c_int64), size, code, _Out)
        self._value = self._function(82, _Pointer, _Out, size, code, _Out)
        self._release_status = self._function(93, None, _Pointer)
        self._release_value = self._function(96, None, _Pointer)
        self._named = self._function(68, _Pointer, ctypes.c_char_p, code, code, code, _Out)
        self._memories = {torch.device("cpu"): self._make(self._cpu, 0, 0)}

    def _function(self, place: int, result: Any, *arguments: Any) -> Callable[..., Any]:
        address = _Pointer.from_address(self._table + place * ctypes.sizeof(_Pointer)).value
        return ctypes.CFUNCTYPE(result, *arguments)(address or 0)

    def _make(self, function: Callable[..., Any], *arguments: Any) -> int:
        """Call a function that returns its result through the last argument."""
        made = _Pointer()
        status = function(*arguments, ctypes.byref(made))
        if status:
            message = self._message(status).decode(errors="replace")
            self._release_status(status)
            raise CheckpointError(f"ONNX Runtime could not make a tensor sequence: {message}", remedy="Use OrtOptimizer(fused=True).")
        return made.value or 0

    def data(self, value: int) -> int:
        return self._make(self._data, value)

    def memory(self, device: torch.device) -> int:
        """ONNX Runtime's description of a device's memory. It only names the memory, so it can be made without that device."""
        if device not in self._memories:
            made = self._make(self._named, b"Cuda", _DEVICE_ALLOCATOR, device.index or 0, _DEFAULT_MEMORY)
            self._memories[device] = made
        return self._memories[device]

    def sequence(self, pieces: Sequence[Piece], device: torch.device) -> int:
        parts, memory = (_Pointer * len(pieces))(), self.memory(device)
        try:
            for index, (address, count) in enumerate(pieces):
                parts[index] = self._make(self._tensor, memory, address, 4 * count, (ctypes.c_int64 * 1)(count), 1, _FLOAT)
            return self._make(self._value, parts, len(pieces), _SEQUENCE)
        finally:
            for part in parts:
                if part:
                    self._release_value(part)

    def place(self, sequence: int, value: Any) -> None:
        """Swap the contents of two OrtValues: the Python object gets the sequence, its old value is released."""
        target = _native(value)
        held = ctypes.string_at(target, _ORT_VALUE_BYTES)
        ctypes.memmove(target, sequence, _ORT_VALUE_BYTES)
        ctypes.memmove(sequence, held, _ORT_VALUE_BYTES)
        self._release_value(sequence)


def available() -> bool:
    """Whether `make_sequence` works with the onnxruntime that is installed."""
    return _api() is not None


def make_sequence(pieces: Sequence[Piece], device: torch.device = _CPU) -> Any:
    """An OrtValue that is a sequence of flat tensors of float32 on these pieces of the device's memory.

    It does not keep the memory alive: the caller must.
    """
    api = _api()
    if api is None:
        raise CheckpointError("tensor sequences can't be made with this onnxruntime", remedy="Use OrtOptimizer(fused=True).")
    value = to_ort(torch.zeros(1))
    api.place(api.sequence(pieces, device), value)
    return value


def _native(value: Any) -> int:
    """The address of the C++ object that a pybind11 object holds: the pointer follows the PyObject header."""
    return _Pointer.from_address(id(value) + object.__basicsize__).value or 0


@functools.cache
def _api() -> _Api | None:
    import onnxruntime

    library = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_shared.so"
    # Check the version first: another release may have a different layout.
    if sys.platform != "linux" or onnxruntime.__version__.encode() != _RELEASE or not installed().dlpack or not library.is_file():
        return None
    get_host = ctypes.CDLL(str(library)).Provider_GetHost
    get_host.restype = _Pointer
    host = get_host()
    if not host:
        return None
    virtual_functions = _Pointer.from_address(host).value or 0
    get_base = ctypes.CFUNCTYPE(_Pointer, _Pointer)(_Pointer.from_address(virtual_functions).value or 0)
    base = _Base.from_address(get_base(host))
    if base.get_version() != _RELEASE:
        return None
    api = _Api(base.get_api(_API_VERSION))
    probe = torch.zeros(1)
    value = to_ort(probe)
    return api if api.data(_native(value)) == probe.data_ptr() else None
