"""Nested Python data with tensors inside (state dicts of any kind) as JSON plus named tensors, and back. Nothing is pickled.

A tensor that is already in the ORT checkpoint is written as a reference to it, so that nothing is stored twice.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Mapping, Set
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from ..checkpoint.state import CheckpointState
from ..errors import CorruptFileError, UnsupportedError
from ..storage.paths import PathLike
from ..storage.tensors import memory_key

_PLAIN = (bool, int, float, str)


def encode(value: Any, known: Mapping[Any, str]) -> tuple[Any, dict[str, torch.Tensor]]:
    """(JSON-able form, the tensors it refers to). `known` comes from `labels`: tensors that are stored elsewhere already."""
    tensors: dict[str, torch.Tensor] = {}
    return _encode(value, "", known, tensors), tensors


def decode(form: Any, tensors: Mapping[str, torch.Tensor], state: CheckpointState | None, path: PathLike) -> Any:
    """The reverse of `encode`; references are looked up in `tensors` and `state`."""
    known = dict(state.tensors()) if state is not None else {}
    try:
        return _decode(form, tensors, known)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"malformed ({type(error).__name__}: {error})", path=path) from error


def labels(state: CheckpointState) -> dict[Any, str]:
    """What identifies a tensor's memory -> its label in the state."""
    return {memory_key(value): label for label, value in state.tensors() if isinstance(value, torch.Tensor) and value.numel()}


def _encode(value: Any, where: str, known: Mapping[Any, str], tensors: dict[str, torch.Tensor]) -> Any:
    def inner(item: Any, key: Any) -> Any:
        return _encode(item, f"{where}/{key}", known, tensors)

    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach()
        label = known.get(memory_key(value)) if value.numel() else None
        if label is not None:
            return {"$ort": label}
        tensors[where] = value
        return {"$tensor": where}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensors[where] = torch.from_numpy(np.ascontiguousarray(value))
        return {"$array": where}
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if isinstance(value, Counter):
        return {"$counter": [[inner(key, "key"), count] for key, count in value.items()]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: inner(item, key) for key, item in value.items()}
        return {"$dict": [[inner(key, "key"), inner(item, key)] for key, item in value.items()]}
    if isinstance(value, list):
        return [inner(item, index) for index, item in enumerate(value)]
    for tag, (kind, parts) in _TAGGED.items():
        if isinstance(value, kind):
            return {tag: [inner(item, index) for index, item in enumerate(parts(value))]}
    raise UnsupportedError(
        f"a {type(value).__module__}.{type(value).__name__} can't be stored without pickling",
        field=where.lstrip("/"),
        remedy="Keep tensors, numbers, text and containers of them in state dicts.",
    )


def _decode(form: Any, tensors: Mapping[str, torch.Tensor], known: Mapping[str, Any]) -> Any:
    if isinstance(form, list):
        return [_decode(item, tensors, known) for item in form]
    if not isinstance(form, dict):
        return form
    tag = next(iter(form), "")
    if not tag.startswith("$"):
        return {key: _decode(item, tensors, known) for key, item in form.items()}
    content = form[tag]
    if tag == "$ort":
        return known[content]
    if tag == "$tensor":
        return tensors[content]
    if tag == "$array":
        return tensors[content].numpy()
    if tag in ("$dict", "$counter"):
        pairs = [(_decode(key, tensors, known), _decode(item, tensors, known)) for key, item in content]
        return Counter(dict(pairs)) if tag == "$counter" else dict(pairs)
    return _BUILD[tag]([_decode(item, tensors, known) for item in content])


_TAGGED: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "$tuple": (tuple, list),
    "$set": (Set, sorted),
    "$bytes": (bytes, lambda value: [base64.b64encode(value).decode()]),
    "$path": (PurePath, lambda value: [str(value)]),
    "$dtype": (torch.dtype, lambda value: [str(value).removeprefix("torch.")]),
    "$device": (torch.device, lambda value: [str(value)]),
    "$plain": (_PLAIN, lambda value: [next(kind(value) for kind in _PLAIN if isinstance(value, kind))]),
}
"""Types that JSON lacks: tag -> (type, its parts). The last one takes subclasses of plain values, such as enumerations of strings."""

_BUILD: dict[str, Callable[[list[Any]], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$bytes": lambda parts: base64.b64decode(parts[0], validate=True),
    "$path": lambda parts: Path(parts[0]),
    "$dtype": lambda parts: _dtype(parts[0]),
    "$device": lambda parts: torch.device(parts[0]),
    "$plain": lambda parts: parts[0],
}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is not an element type")
    return found
