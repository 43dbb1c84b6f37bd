"""Mutations of structure rather than of bytes: a file is taken apart into nested Python data, changed there, and put together again.

Lengths and checksums stay right, so that readers get to the content: exchanged parts, parts of another file, values of another type.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Codec:
    """Bytes to a tree of dicts, lists and values, and back. `fix` (optional) makes sizes agree again after a change."""

    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    fix: Callable[[Any], None] | None = None


def change_structure(rng: random.Random, codec: Codec, content: bytes, donor: bytes | None) -> tuple[bytes, str] | None:
    """The changed file and what was done; None where what came out can't be written down."""
    try:
        tree = codec.decode(content)
        other = codec.decode(donor) if donor is not None else tree
    except Exception:  # an earlier mutation may have broken the structure
        return None
    for _ in range(4):
        try:
            box = [copy.deepcopy(tree)]
            story = [_change(rng, box, other) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
            if codec.fix is not None and rng.random() < 0.6:
                codec.fix(box[0])
                story.append("sizes fixed")
            return codec.encode(box[0]), ", ".join(story)
        except Exception:  # nothing is left, or the format has no bytes for it
            continue
    return None


Place = tuple[Any, Any]
"""A container and the key or index of one value in it."""


def _places(tree: Any) -> Iterator[Place]:
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _places(value)


def _change(rng: random.Random, box: list[Any], donor: Any) -> str:
    places = list(_places(box))
    container, key = rng.choice(places)
    for _ in range(rng.randrange(3)):  # inner places are many, and mostly numbers: give the outer ones a chance
        if not isinstance(container[key], (dict, list)):
            container, key = rng.choice(places)
    return rng.choice(_CHANGES)(rng, container, key, places, list(_places([donor])))


def _swap(rng: random.Random, container: Any, key: Any, places: list[Place], _: list[Place]) -> str:
    other, place = rng.choice(places)
    first, second = container[key], other[place]
    if not (_inside(first, second) or _inside(second, first)):
        container[key], other[place] = second, first
    return f"{key!r:.40} swapped with {place!r:.40}"


def _swap_alike(rng: random.Random, container: Any, key: Any, places: list[Place], _: list[Place]) -> str:
    """With something of the same name elsewhere: one tensor's dims with another's."""
    alike = [(other, place) for other, place in places if place == key and other is not container]
    if not alike:
        return "unchanged"
    other, place = rng.choice(alike)
    if not (_inside(container[key], other[place]) or _inside(other[place], container[key])):
        container[key], other[place] = other[place], container[key]
    return f"{key!r:.40} swapped with its like"


def _graft(rng: random.Random, container: Any, key: Any, _: list[Place], donors: list[Place]) -> str:
    alike = [(other, place) for other, place in donors if place == key]
    other, place = rng.choice(alike if alike and rng.random() < 0.6 else donors)
    container[key] = copy.deepcopy(other[place])
    return f"{key!r:.40} from another file's {place!r:.40}"


def _another_type(rng: random.Random, container: Any, key: Any, *_: Any) -> str:
    container[key] = copy.deepcopy(rng.choice(ODD))
    return f"{key!r:.40} becomes {container[key]!r:.40}"


def _another_number(rng: random.Random, container: Any, key: Any, places: list[Place], _: list[Place]) -> str:
    value = container[key]
    if isinstance(value, (str, bytes)) and value[:1] in ("{", b"{"):
        return _inside_json(rng, container, key)
    if isinstance(value, torch.Tensor):
        return _another_tensor(rng, container, key, places)
    if isinstance(value, (bytes, str)):
        container[key] = rng.choice((value * 2, value[: len(value) // 2], value[1:], value[:0]))
    elif isinstance(value, (int, float)):
        numbers = [other[place] for other, place in places if isinstance(other[place], int)] or [0]
        near = int(value) if math.isfinite(value) else 0
        container[key] = rng.choice((near + 1, near - 1, -near, near * 2, 0, 1 << 31, (1 << 63) - 1, 1 << 40, rng.choice(numbers)))
    return f"{key!r:.40} changed"


def _another_tensor(rng: random.Random, container: Any, key: Any, places: list[Place], *_: Any) -> str:
    """A tensor of another kind, where there are any."""
    tensors = [(other, place) for other, place in places if isinstance(other[place], torch.Tensor)]
    if not tensors:
        return _another_type(rng, container, key)
    container, key = rng.choice(tensors)
    number = rng.randrange(len(_TENSORS))
    container[key] = _TENSORS[number](container[key])
    return f"{key!r:.40} a tensor of kind {number}"


def _inside_json(rng: random.Random, container: Any, key: Any) -> str:
    """A JSON text inside the file: changed as data, and written again."""
    try:
        box = [json.loads(container[key])]
        story = _change(rng, box, box[0])
        text = json.dumps(box[0], default=repr)
    except (ValueError, TypeError):
        return "unchanged"
    container[key] = text.encode() if isinstance(container[key], bytes) else text
    return f"in {key!r:.40}: {story}"


def _remove(_: random.Random, container: Any, key: Any, *__: Any) -> str:
    del container[key]
    return f"{key!r:.40} removed"


def _double(rng: random.Random, container: Any, key: Any, places: list[Place], _: list[Place]) -> str:
    value = copy.deepcopy(container[key])
    if isinstance(container, list):
        container[rng.randrange(len(container) + 1) : 0] = [value] * rng.choice((1, 1, 2, 50))
    else:
        name = rng.choice([place for _, place in places if type(place) is type(key)])
        container[rng.choice((name, f"{key}2" if isinstance(key, str) else name))] = value
    return f"{key!r:.40} twice"


def _rename(rng: random.Random, container: Any, key: Any, places: list[Place], _: list[Place]) -> str:
    if isinstance(container, list):
        rng.shuffle(container)
        return "reordered"
    name = rng.choice([place for _, place in places if type(place) is type(key)])
    if isinstance(key, str) and rng.random() < 0.5:
        name = rng.choice(("", "..", "/", "\0", f"{key}_fp16", "\x1b[2J", key.upper(), key * 30))
    container[name] = container.pop(key)
    return f"{key!r:.40} renamed to {name!r:.40}"


def _inside(inner: Any, outer: Any) -> bool:
    return inner is outer or any(inner is other[place] for other, place in _places(outer))


_CHANGES = (
    *(_swap, _swap_alike, _swap_alike, _graft, _graft, _another_type, _another_tensor),
    *(_another_number, _another_number, _remove, _double, _rename),
)


def _deep(levels: int) -> Any:
    tree: Any = []
    for _ in range(levels):
        tree = [tree]
    return tree


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 255, 1 << 31, 1 << 63, -(1 << 63), 10**400, 1.5, -0.0, math.nan, math.inf),
    *("", "x", "Infinity", "0", "..", "/etc/passwd", "\0", "\ud800", b"", b"\0", b"\xff" * 9, b"x" * 100),
    *([], {}, [0], [[]], {"": {}}, {"a": 1}, [1, "a", None], _deep(40), [0] * 70, torch.ones(2), torch.tensor(1), torch.empty(0)),
)

_TENSORS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda value: value.reshape(-1)[:0],
    lambda value: value.reshape(-1)[:1].expand(1 << 50) if value.numel() else value,
    lambda value: value.to(torch.float64),
    lambda value: value.to(torch.complex64),
    lambda value: value.t() if value.ndim == 2 else value[None],
    lambda value: value.to_sparse(),
    lambda value: value.bool(),
    lambda value: torch.nn.Parameter(value.float()),
    lambda value: value.to("meta"),
    lambda value: torch.quantize_per_tensor(value.float(), 0.1, 0, torch.quint8),
    lambda value: value.numpy().tolist(),
)
