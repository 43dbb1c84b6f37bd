"""ONNX attributes and constant tensors as Python and torch values."""

from __future__ import annotations

import keyword
import re
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from ...dtypes import TORCH_FROM_ONNX
from ...errors import CorruptFileError, UnsupportedError
from ..description import ONNX_ERRORS, attribute_value

_DTYPE_ATTRIBUTES = {"to", "dtype", "output_dtype", "softmax_precision", "qk_matmul_precision"}
_LONGEST = 60
_MAX_FLOAT32 = torch.finfo(torch.float32).max
_NOT_FOR_VALUES = {"self", "torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree"}
"""Names reserved in the code of an fx graph."""
_IGNORED_ATTRIBUTES = {"__backwardpass", "onnx_opset_version"}
"""Marks that ORT's graph builder leaves on nodes."""


def read_attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Numbers, strings, lists and tensors; element types become torch dtypes. Subgraphs stay `GraphProto`."""
    return {attribute.name: _attribute(attribute) for attribute in node.attribute if attribute.name not in _IGNORED_ATTRIBUTES}


def read_tensor(proto: onnx.TensorProto) -> torch.Tensor | np.ndarray[Any, Any]:
    """The constant as a torch tensor; string tensors are numpy object arrays."""
    if proto.data_type == onnx.TensorProto.STRING:
        return _array(proto)
    dtype = torch_dtype(proto.data_type)
    array = _array(proto)
    if array.dtype.kind == "V" or array.dtype.name not in _PLAIN:  # bfloat16 and float8, which numpy only knows as bits
        bits = np.ascontiguousarray(array).view(np.int16 if array.dtype.itemsize == 2 else np.uint8)
        return torch.from_numpy(bits.copy()).view(dtype).reshape(array.shape)
    return torch.from_numpy(np.array(array, copy=True, order="C"))


def _array(proto: onnx.TensorProto) -> np.ndarray[Any, Any]:
    try:
        if any(size < 0 for size in proto.dims):
            raise ValueError(f"shape {list(proto.dims)}")
        return numpy_helper.to_array(proto)
    except (ValueError, TypeError, KeyError, *ONNX_ERRORS) as error:
        raise CorruptFileError(f"a constant that does not fit its type and shape ({error})", field=proto.name) from error


def constant_value(node: onnx.NodeProto) -> torch.Tensor | np.ndarray[Any, Any]:
    """What a `Constant` node holds, whichever of its attributes holds it."""
    (attribute,) = node.attribute
    value = attribute_value(attribute)
    if attribute.name == "value":
        return read_tensor(value)
    kinds = {"value_int": torch.int64, "value_ints": torch.int64, "value_float": torch.float32, "value_floats": torch.float32}
    if attribute.name in kinds:
        return torch.tensor(value, dtype=kinds[attribute.name])
    raise UnsupportedError(f"a Constant given by {attribute.name} is not supported", field=node.name or node.output[0])


def torch_dtype(number: int) -> torch.dtype:
    """The torch dtype of an ONNX element type number."""
    if number not in TORCH_FROM_ONNX:
        raise UnsupportedError(
            f"element type {number} has no equivalent in torch", remedy="String, 4-bit and newer float types are not supported."
        )
    return TORCH_FROM_ONNX[number]


def identifier(name: str) -> str:
    """A Python identifier close to an ONNX name (to its end, if it is long)."""
    text = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")[-_LONGEST:].lstrip("_") or "value"
    if keyword.iskeyword(text) or text in _NOT_FOR_VALUES:
        return f"{text}_"
    return f"v_{text}" if text[0].isdigit() else text


def plain_numbers(tensor: torch.Tensor) -> Any:
    """As `tolist`, but a float32 becomes the shortest number that rounds to it: 0.1, not 0.10000000149011612. In
    float32 that is the same, and in double precision it is what the model's author meant."""
    if tensor.dtype != torch.float32:
        return tensor.tolist()
    return _shortest(tensor.detach().cpu().numpy())


def _shortest(value: Any) -> Any:
    if value.ndim:
        return [_shortest(item) for item in value]
    number = float(str(value[()]))
    return number if abs(number) <= _MAX_FLOAT32 else float(value)  # the largest float32's is beyond it


_PLAIN = {
    "bool",
    "complex64",
    "complex128",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
}


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = attribute_value(attribute)
    if attribute.type == onnx.AttributeProto.TENSOR:
        return read_tensor(value)
    if attribute.type == onnx.AttributeProto.STRING:
        return value.decode()
    if attribute.type == onnx.AttributeProto.STRINGS:
        return [text.decode() for text in value]
    if attribute.type in (onnx.AttributeProto.FLOAT, onnx.AttributeProto.FLOATS):
        return _shortest(np.asarray(value, np.float32))
    if attribute.type == onnx.AttributeProto.INT and attribute.name in _DTYPE_ATTRIBUTES:
        return torch_dtype(value)
    return list(value) if attribute.type == onnx.AttributeProto.INTS else value
