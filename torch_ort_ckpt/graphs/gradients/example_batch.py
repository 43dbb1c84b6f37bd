"""A batch to trace a graph with, made from what the graph says about its inputs."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from ...errors import UnsupportedError
from ..description import TensorSpec
from .capture import TRACING_ERRORS
from .where import first_line

_UNNAMED = "?"
_SIZES = (5, 7, 9, 11, 13, 17, 19, 23)
"""Sizes for the dynamic dimensions, in order: different ones, so that no two are taken for the same."""
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def open_sizes(specs: Sequence[TensorSpec]) -> dict[str, dict[int, str]]:
    """Input -> axis -> name of every dimension that the graph leaves open."""
    return {spec.name: {axis: _name(spec, axis) for axis, size in enumerate(spec.shape or ()) if isinstance(size, str)} for spec in specs}


def batch_of(specs: Sequence[TensorSpec], module: nn.Module) -> list[torch.Tensor]:
    """Tensors that the module takes. Indices and labels are 0, which is in every range; the rest is random, always the same.

    Dimensions of one name get one size. If the module then fails, dimensions of different names may have to be equal: those on the same
    axis first, then all.
    """
    for spec in specs:
        if spec.dtype is None or spec.shape is None:
            raise UnsupportedError(
                "an input without a known type and shape", field=spec.name, remedy="Pass example_inputs=, tensors that the graph takes."
            )
    failed: BaseException | None = None
    for sizes in _assignments(specs):
        batch = [_tensor(spec, sizes) for spec in specs]
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                before = {name: value.clone() for name, value in module.named_buffers()}
                module(*batch)
            return batch
        except TRACING_ERRORS as error:
            failed = failed or error
        finally:
            with torch.no_grad():
                for name, value in module.named_buffers():
                    value.copy_(before[name])
    assert failed is not None
    raise UnsupportedError(
        f"no batch could be made that the graph takes ({first_line(failed)})",
        remedy="Pass example_inputs=, tensors that the graph takes.",
    ) from failed


def _assignments(specs: Sequence[TensorSpec]) -> Iterator[Mapping[str, int]]:
    """Name of a dimension -> its size, in the order in which they are tried."""
    places = [(_name(spec, axis), axis) for spec in specs for axis, size in enumerate(spec.shape or ()) if isinstance(size, str)]
    names = list(dict.fromkeys(name for name, _ in places if name.isidentifier()))
    yield {name: _SIZES[place % len(_SIZES)] for place, name in enumerate(names)}
    first = dict(reversed(places))
    yield {name: _SIZES[first[name] % len(_SIZES)] for name in names}
    for size in (6, 8, 12, 16, 32, 64, 224):
        yield dict.fromkeys(names, size)


def _tensor(spec: TensorSpec, sizes: Mapping[str, int]) -> torch.Tensor:
    assert spec.dtype is not None
    assert spec.shape is not None
    shape = [size if isinstance(size, int) else _size(_name(spec, axis), sizes) for axis, size in enumerate(spec.shape)]
    if spec.dtype.is_floating_point:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(spec.dtype)
    return torch.ones(shape, dtype=spec.dtype) if spec.dtype is torch.bool else torch.zeros(shape, dtype=spec.dtype)


def _size(name: str, sizes: Mapping[str, int]) -> int:
    """The size of a dimension; exporters write some as a term of others (`2*batch + 1`)."""
    if name in sizes:
        return sizes[name]
    try:
        return _term(ast.parse(name, mode="eval").body, sizes)
    except (SyntaxError, KeyError, ZeroDivisionError):
        return _SIZES[0]


def _term(node: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_term(node.left, sizes), _term(node.right, sizes))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return sizes.setdefault(node.id, _SIZES[0]) if isinstance(sizes, dict) else sizes[node.id]
    raise KeyError(ast.dump(node))


def _name(spec: TensorSpec, axis: int) -> str:
    size = (spec.shape or ())[axis]
    return f"{spec.name}_axis{axis}" if size == _UNNAMED else str(size)
