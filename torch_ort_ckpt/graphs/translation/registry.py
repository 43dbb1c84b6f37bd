"""Which torch function runs which ONNX operator: the table that `register_op` fills and `find_op` reads.

An operator is one function. Its positional parameters are the node's inputs, its keyword-only parameters the node's attributes, by
their ONNX names and defaults. What an input may be is said by the annotation: `Tensor`, `Ints` (a shape, axes: Python ints, so that
nothing is read back from a device and `torch.compile` sees no graph break), `Scalar` (a tensor, or a Python number where it is known) or
`Operand` (the same, but never a number without a tensor beside it, which gives the result its type).
Three keyword names are filled in by the translator: `outputs` (how many outputs the graph uses), `device` (where the model runs) and
`number_dtype` (the type that the numbers have in the graph; None if there are only tensors).
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import torch

from ...errors import UnsupportedError


class Kind(Enum):
    """What a function wants for one of its inputs."""

    TENSOR = "tensor"
    HOST = "Python ints"
    SCALAR = "tensor or number"
    OPERAND = "tensor, or a number beside a tensor"


Ints = Annotated[Sequence[int], Kind.HOST]
Int = Annotated[int, Kind.HOST]
Scalar = Annotated[Any, Kind.SCALAR]
Operand = Annotated[Any, Kind.OPERAND]

MICROSOFT = "com.microsoft"
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Op:
    """One operator from opset version `since` on."""

    name: str
    domain: str
    since: int
    function: Callable[..., Any]
    kinds: tuple[Kind, ...]
    rest: Kind
    keywords: frozenset[str] | None
    """Names of its parameters, `*` and `**` if it takes any; None for torch's own functions, which are not checked."""

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Attributes that need not be passed if a node has exactly these values."""
        if self.keywords is None:
            return {}
        parameters = inspect.signature(self.function).parameters.values()
        return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}

    def kind(self, position: int) -> Kind:
        return self.kinds[position] if position < len(self.kinds) else self.rest

    @property
    def variadic(self) -> bool:
        return self.keywords is not None and "*" in self.keywords

    def takes(self, keyword: str) -> bool:
        return self.keywords is not None and (keyword in self.keywords or "**" in self.keywords)


_OPS: dict[tuple[str, str], list[Op]] = {}


def register_op(name: str, *, domain: str = "", since: int = 1, takes: Sequence[Kind] | None = None) -> Callable[[_Function], _Function]:
    """Decorator: this function runs ONNX operator `name` from opset version `since` on (until a later registration takes over).

    `takes` replaces the annotations where the function has none (torch's own functions)."""

    def add(function: _Function) -> _Function:
        kinds, rest, keywords = _signature(function)
        if takes is not None:
            kinds = tuple(takes)
        versions = _OPS.setdefault((domain, name), [])
        versions[:] = sorted(
            [op for op in versions if op.since != since] + [Op(name, domain, since, function, kinds, rest, keywords)],
            key=lambda op: op.since,
        )
        return function

    return add


def find_op(domain: str, name: str, version: int, where: str) -> Op:
    """The operator as defined by opset `version` of `domain`; `where` names the node in the error if there is none."""
    versions = _OPS.get((domain, name), [])
    place = bisect_right([op.since for op in versions], version)
    if place == 0:
        full = f"{domain}::{name}" if domain else name
        known = f"; it is known from version {versions[0].since} on" if versions else ""
        raise UnsupportedError(
            f"the torch engine has no operator {full} (opset {version}){known}",
            field=where,
            remedy=f'Add it: decorate a function of torch tensors with @torch_ort_ckpt.register_op("{name}", domain="{domain}").',
        )
    return versions[place - 1]


def supported_ops() -> dict[str, list[str]]:
    """Names of the known operators by domain."""
    table: dict[str, list[str]] = {}
    for domain, name in sorted(_OPS):
        table.setdefault(domain, []).append(name)
    return table


def _signature(function: Callable[..., Any]) -> tuple[tuple[Kind, ...], Kind, frozenset[str] | None]:
    if not inspect.isfunction(function) or function.__module__.partition(".")[0] == torch.__name__:
        return (), Kind.TENSOR, None
    hints = get_type_hints(function, include_extras=True)
    kinds, rest, keywords = [], Kind.TENSOR, set()
    for parameter in inspect.signature(function).parameters.values():
        kind = _kind_of(hints.get(parameter.name))
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = kind
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            kinds.append(kind)
        stars = {inspect.Parameter.VAR_POSITIONAL.value: "*", inspect.Parameter.VAR_KEYWORD.value: "**"}
        keywords.add(stars.get(parameter.kind.value, parameter.name))
    return tuple(kinds), rest, frozenset(keywords)


def _kind_of(hint: Any) -> Kind:
    for part in (*getattr(hint, "__metadata__", ()), *get_args(hint)):
        if isinstance(part, Kind):
            return part
        if (inner := _kind_of(part)) is not Kind.TENSOR:
            return inner
    return Kind.TENSOR
