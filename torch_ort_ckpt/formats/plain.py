"""Plain Python data as JSON and back without loss: JSON has no tuples, and only string keys.

A tuple is `{"__tuple__": [...]}`; a dict that has such a name itself is `{"__dict__": [[name, value], ...]}`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..dtypes import short_name
from ..errors import UnsupportedError
from ..storage.paths import PathLike

_TUPLE, _DICT = "__tuple__", "__dict__"
_LEVELS = 20


def encode(value: Any, path: PathLike | None, field: str, levels: int = _LEVELS) -> Any:
    """Data that JSON can hold. Numpy numbers become Python's; anything else raises, by name."""
    if not levels:
        raise UnsupportedError("nested too deeply", path=path, field=field, remedy=f"Keep it to {_LEVELS} levels.")
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, tuple):
        return {_TUPLE: [encode(item, path, field, levels - 1) for item in value]}
    if isinstance(value, list):
        return [encode(item, path, field, levels - 1) for item in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        content = {str(name): encode(item, path, f"{field}/{name}", levels - 1) for name, item in value.items()}
        return content if not content.keys() & {_TUPLE, _DICT} else {_DICT: [[name, item] for name, item in content.items()]}
    what = "a dict with names that are not text" if isinstance(value, dict) else f"a {type(value).__name__}"
    raise UnsupportedError(
        f"{what}, which is not plain data", path=path, field=field, remedy="Use numbers, text, lists, tuples and dicts of text to those."
    )


def decode(value: Any) -> Any:
    """The reverse. Malformed content raises what malformed data raises in Python."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(decode(_list(value[_TUPLE])))
    if value.keys() == {_DICT}:
        return {_name(name): decode(item) for name, item in _list(value[_DICT])}
    return {name: decode(item) for name, item in value.items()}


def encode_number(value: torch.Tensor, path: PathLike | None, field: str) -> Any:
    """A tensor of one element: just the number for an int64 without dimensions, as a weight's own step usually is."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.dtype not in _NUMBERS or value.ndim > _LEVELS:
        raise UnsupportedError("not one real number", path=path, field=field)
    number = value.item()
    if value.dtype == torch.int64 and value.ndim == 0:
        return number
    if value.dtype.is_floating_point and not math.isfinite(number):
        raise UnsupportedError(f"{number}, where a number is needed", path=path, field=field)
    return {"value": number, "dtype": short_name(value.dtype), "ndim": value.ndim}


def decode_number(content: Any) -> torch.Tensor:
    if type(content) is int:
        return torch.tensor(content)
    dtype = next(dtype for dtype in _NUMBERS if short_name(dtype) == content["dtype"])
    ndim = content["ndim"]
    if type(content["value"]) not in (int, float) or type(ndim) is not int or not 0 <= ndim <= _LEVELS:
        raise TypeError("not a number")
    return torch.tensor(content["value"], dtype=dtype).reshape((1,) * ndim)


_NUMBERS = (torch.int64, torch.float32, torch.float64, torch.int32)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, not {type(value).__name__}")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a name, not {type(value).__name__}")
    return value
