"""What `torch.save` pickles, made from the records of `pickled`: tensors over the file's bytes, and plain data. No function of the file's
choice is called: the few functions with which PyTorch writes tensors are listed here by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import CheckpointError, CorruptFileError, UnsupportedError
from ...pytorch_private import negative_view
from ...storage.paths import PathLike
from ..shapes import element_count
from .pickled import Call, Known, Name, Pairs, PickleError, Reference, UnknownNameError

DTYPES = {name: dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}
"""Element types by the names that pickles have for them."""

_STORAGES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
_OTHER_STORAGES = ("QInt8Storage", "QUInt8Storage", "QInt32Storage", "QUInt4x2Storage", "QUInt2x4Storage", "TypedStorage")
_OTHER_TENSORS = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_sparse_csr_tensor": "a sparse tensor",
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch.nested._internal.nested_tensor._rebuild_njt": "a nested tensor",
    "torch._utils._rebuild_wrapper_subclass": "a tensor subclass",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of a custom device",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of a custom device",
}
"""Tensors that a checkpoint can't hold."""

_SCHEMES = ("per_tensor_affine", "per_channel_affine", "per_tensor_symmetric", "per_channel_symmetric", "per_channel_affine_float_qparams")
_TENSOR_TYPES = ("torch._tensor.Tensor", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")

KNOWN: Known = {
    "torch": frozenset({"Size", "device", "Tensor", *DTYPES, *_STORAGES, *_OTHER_STORAGES, *_SCHEMES}),
    "torch.cuda": frozenset({*_STORAGES, *_OTHER_STORAGES}),
    "torch.storage": frozenset({"UntypedStorage", "TypedStorage"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch._tensor": frozenset({"Tensor", "_rebuild_from_type_v2"}),
    "torch.nn.parameter": frozenset({"Parameter", "Buffer"}),
    "torch._utils": frozenset(
        {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_parameter_with_state"}
        | {"_rebuild_meta_tensor_no_storage"}
        | {name.rpartition(".")[2] for name in _OTHER_TENSORS if name.startswith("torch._utils.")}
    ),
    "torch.nested._internal.nested_tensor": frozenset({"_rebuild_njt", "NestedTensor"}),
    "torch._dynamo.decorators": frozenset({"_DimRange"}),  # in a nested tensor
    "collections": frozenset({"OrderedDict", "defaultdict", "Counter"}),
    "_codecs": frozenset({"encode"}),
    "builtins": frozenset({"set", "frozenset", "bytearray", "complex", "int", "float", "list", "dict"}),
    "__builtin__": frozenset({"set", "frozenset", "bytearray", "complex", "int", "float", "list", "dict"}),
}
"""All names that `torch.save` uses for tensors and plain data."""

_MAX_DEPTH = 100
_KEYS = (str, int, float, bytes, type(None))


class Opaque:
    """Something harmless that is neither a tensor nor plain data, such as a device or a set."""

    def __init__(self, what: str) -> None:
        self.what = what


class Objects:
    """Makes objects of one pickle's records. `storage` gives the bytes (flat uint8) of a storage by its key and size."""

    def __init__(self, storage: Callable[[str, int], torch.Tensor], path: PathLike, size: int) -> None:
        self.storage, self.path = storage, path
        self.left = 10_000 + 4 * size  # values: a list that holds one list many times, and so on, would make any number
        self.tensors: dict[int, torch.Tensor] = {}  # by the identity of the record: tied tensors stay tied

    def plain(self, value: Any, where: str = "", depth: int = 0) -> Any:
        """Tensors, dictionaries, lists, tuples, numbers and text; `Opaque` for anything else that is known."""
        self.left -= 1
        if self.left < 0 or depth > _MAX_DEPTH:
            raise CorruptFileError("more values than the file can hold, or nested too deeply", path=self.path, field=where or None)
        if isinstance(value, Pairs):
            return self._dict(value, where, depth)
        if isinstance(value, (tuple, list)):
            return type(value)([self.plain(item, where, depth + 1) for item in value])
        if isinstance(value, Call):
            return self._object(value, where, depth)
        if isinstance(value, (Name, Reference)):
            return Opaque(value.full if isinstance(value, Name) else "a storage")
        return value

    def _dict(self, pairs: Pairs, where: str, depth: int) -> Any:
        if not all(type(key) in _KEYS and not (isinstance(key, int) and key.bit_length() > 60) for key, _ in pairs):
            return Opaque("a dictionary whose keys are neither text nor small numbers")
        prefix = f"{where}." if where else ""
        return {key: self.plain(item, f"{prefix}{str(key)[:200]}"[:1000], depth + 1) for key, item in pairs}

    def _object(self, call: Call, where: str, depth: int) -> Any:
        function = call.function
        if function in ("collections.OrderedDict", "collections.defaultdict", "collections.Counter"):
            content = call.content if isinstance(call.content, Pairs) else Pairs()
            first = call.arguments[0] if call.arguments else None
            if isinstance(first, Pairs):  # a Counter
                content = first
            elif isinstance(first, list):  # as Python 2 wrote an OrderedDict
                content = Pairs(tuple(item) for item in first if isinstance(item, (list, tuple)) and len(item) == 2)
            return self._dict(content, where, depth)
        if function == "torch.Size":
            return self.plain(call.arguments[0] if call.arguments else (), where, depth + 1)
        if function == "_codecs.encode":
            return _encoded(call)
        if function.startswith(("torch._utils.", "torch._tensor.", "torch.nested.")):
            if id(call) not in self.tensors:
                self.tensors[id(call)] = self.tensor(call, where)
            return self.tensors[id(call)]
        return Opaque(function)

    def tensor(self, call: Any, where: str = "") -> torch.Tensor:
        """The tensor that one of PyTorch's own functions would return for these arguments."""
        try:
            return self._tensor(call, where, 0)
        except (CheckpointError, UnknownNameError):
            raise
        except (ValueError, TypeError, IndexError, RuntimeError, OverflowError) as error:
            what = (str(error).splitlines() or [""])[0][:200]
            raise CorruptFileError(f"not a tensor as torch.save writes it ({what})", path=self.path, field=where or None) from error

    def _tensor(self, call: Any, where: str, depth: int) -> torch.Tensor:
        if not isinstance(call, Call) or depth > 4:
            raise TypeError("expected a tensor")
        kind, arguments = call.function, call.arguments
        if kind in _OTHER_TENSORS:
            raise UnsupportedError(
                f"{_OTHER_TENSORS[kind]}, which checkpoints do not hold",
                path=self.path,
                field=where or None,
                remedy="Save it as an ordinary tensor (.to_dense(), .dequantize(), .to_padded_tensor()).",
            )
        if kind in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            return self._tensor(arguments[0], where, depth + 1)
        if kind == "torch._tensor._rebuild_from_type_v2":
            function, subclass, inner = arguments[:3]
            if not isinstance(function, Name) or not isinstance(inner, tuple):
                raise TypeError("expected a tensor")
            if not isinstance(subclass, Name) or subclass.full not in _TENSOR_TYPES:
                raise UnknownNameError(subclass.full if isinstance(subclass, Name) else "a subclass of Tensor")
            return self._tensor(Call(function.full, inner), where, depth + 1)
        if kind == "torch._utils._rebuild_meta_tensor_no_storage":
            dtype, size = arguments[:2]
            element_count(_sizes(size))
            return torch.empty(_sizes(size), dtype=_dtype(dtype), device="meta")
        if kind == "torch._utils._rebuild_tensor_v3":
            reference, offset, size, stride, _, _, dtype, *more = arguments
            return self._strided(reference, offset, size, stride, _dtype(dtype), more)
        if kind == "torch._utils._rebuild_tensor_v2":
            reference, offset, size, stride, _, _, *more = arguments
            return self._strided(reference, offset, size, stride, None, more)
        if kind == "torch._utils._rebuild_tensor":
            reference, offset, size, stride = arguments
            return self._strided(reference, offset, size, stride, None, [])
        raise TypeError(f"{kind} does not make a tensor")

    def _strided(self, reference: Any, offset: Any, size: Any, stride: Any, dtype: torch.dtype | None, more: list[Any]) -> torch.Tensor:
        key, stored, nbytes = storage_identity(reference)
        if stored is None:
            raise UnsupportedError("a quantized tensor, which checkpoints do not hold", path=self.path, remedy="Save it .dequantize()d.")
        dtype = dtype or stored
        sizes, strides = _sizes(size), _sizes(stride)
        count = element_count(sizes)
        if len(sizes) != len(strides) or type(offset) is not int or min((offset, *strides)) < 0:
            raise ValueError("a shape and strides that do not match")
        flat = self.storage(key, nbytes)
        last = offset + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
        if count and (last + 1) * dtype.itemsize > nbytes:
            raise ValueError(f"it reaches byte {(last + 1) * dtype.itemsize} of a storage of {nbytes}")
        if not count:
            return torch.empty(sizes, dtype=dtype)
        whole = flat[: nbytes - nbytes % dtype.itemsize].view(dtype)
        return _marked(whole.as_strided(sizes, strides, offset), more[0] if more else None)


def storage_identity(reference: Any) -> tuple[str, torch.dtype | None, int]:
    """Key, element type (None for quantized ones) and size in bytes of `("storage", FloatStorage, key, location, elements)`."""
    identity = reference.identity if isinstance(reference, Reference) else None
    if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
        raise PickleError("a storage in a form that torch.save does not write")
    _, kind, key, _, count, *view = identity
    if (
        not isinstance(kind, Name)
        or not isinstance(key, str)
        or type(count) is not int
        or not 0 <= count < 1 << 60
        or view not in ([], [None])
    ):
        raise PickleError("a storage in a form that torch.save does not write")
    name = kind.full.rpartition(".")[2]
    if name in _OTHER_STORAGES:
        return key, None, count
    if name not in _STORAGES:
        raise PickleError(f"a storage of type {kind.full}")
    return key, _STORAGES[name], count * _STORAGES[name].itemsize


def _marked(value: torch.Tensor, notes: Any) -> torch.Tensor:
    """Views that are conjugates or negatives of their storage have a last argument for it."""
    marks = dict(notes) if isinstance(notes, Pairs) and all(isinstance(key, str) for key, _ in notes) else {}
    value = torch.conj(value) if marks.get("conj") is True else value
    return negative_view(value) if marks.get("neg") is True else value


def _sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, Call) and value.function == "torch.Size":
        value = value.arguments[0] if value.arguments else ()
    if not isinstance(value, (tuple, list)) or not all(type(size) is int and size.bit_length() <= 64 for size in value):
        raise ValueError("not a valid shape")
    return tuple(value)


def _dtype(value: Any) -> torch.dtype:
    module, _, name = value.full.rpartition(".") if isinstance(value, Name) else ("", "", "")
    if module != "torch" or name not in DTYPES:
        raise ValueError("an element type that PyTorch does not have")
    return DTYPES[name]


def _encoded(call: Call) -> Any:
    """How protocol 2 writes bytes."""
    if len(call.arguments) == 2 and isinstance(call.arguments[0], str) and call.arguments[1] == "latin1":
        try:
            return call.arguments[0].encode("latin1")
        except UnicodeEncodeError as error:
            raise PickleError("not valid bytes") from error
    return Opaque("bytes")
