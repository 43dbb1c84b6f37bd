"""The tables of decompositions, and how functions get into them.

A decomposition takes an operator's arguments and returns its result, computed by simpler operators. It may return `NotImplemented`
for arguments that it does not cover: the operator then stays in the graph.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch_ort_ckpt.errors import CheckpointError

from .private import OpOverload, Replacing, Rewrite, call_native, kernels_above_autograd, masks_as_given, shape_functions

Function = TypeVar("Function", bound=Callable[..., Any])

AFTER: dict[OpOverload, Rewrite] = {}
FAST: dict[OpOverload, Rewrite] = {}
BEFORE: dict[OpOverload, Rewrite] = {}
SHAPES: dict[OpOverload, Rewrite] = {}
"""Our own: decompositions after autograd, faster forms of them, decompositions before autograd, and shape functions of fake tensors."""

FUNCTIONS: dict[Callable[..., Any], Rewrite] = {}
"""Python functions of PyTorch that can't be exported as they are, and what is called instead."""

_users_after: dict[OpOverload, Rewrite] = {}
_users_before: dict[OpOverload, Rewrite] = {}


def after(*operators: OpOverload) -> Callable[[Function], Function]:
    """Marks a decomposition of operators in the joint graph, forward or backward, which autograd has seen already."""
    return functools.partial(_enter, AFTER, operators)


def fast(*operators: OpOverload) -> Callable[[Function], Function]:
    """Marks a faster form of a decomposition after autograd. Where it returns `NotImplemented`, the plain one is used."""
    return functools.partial(_enter, FAST, operators)


def before(*operators: OpOverload) -> Callable[[Function], Function]:
    """Marks a function that replaces operators before autograd sees them, so that autograd differentiates the function."""
    return functools.partial(_enter, BEFORE, operators)


def shape_of(*operators: OpOverload) -> Callable[[Function], Function]:
    """Marks a function (fake_mode, operator, *arguments) that says what an operator returns, without turning dynamic sizes into numbers."""
    return functools.partial(_enter, SHAPES, operators)


def _enter(table: dict[OpOverload, Rewrite], operators: tuple[OpOverload, ...], function: Function) -> Function:
    for operator in operators:
        table[operator] = function
    return function


def register_decomposition(operator: Any, *, before_autograd: bool = False) -> Callable[[Function], Function]:
    """Adds a decomposition of an operator that can't be translated to ONNX, or replaces ours.

    The decorated function takes the operator's arguments and returns what the operator returns, made of operators that can be translated.
    With `before_autograd`, autograd differentiates the function instead of the operator: then there is no need to decompose the
    operator's backward. A function that returns `NotImplemented` leaves the operator as it is.

        @register_decomposition(torch.ops.aten.cosh.default)
        def cosh(x):
            return (torch.exp(x) + torch.exp(-x)) / 2
    """
    if not isinstance(operator, OpOverload):
        overloads = getattr(operator, "overloads", None)
        names = [f"torch.ops.{str(operator).replace('::', '.')}.{name}" for name in overloads()] if callable(overloads) else []
        raise CheckpointError(
            f"register_decomposition takes an operator such as torch.ops.aten.cosh.default, not {operator!r}",
            remedy=f"Name one of its overloads: {', '.join(names)}." if names else "Name the operator that the error message named.",
        )
    table = _users_before if before_autograd else _users_after

    def enter(function: Function) -> Function:
        given: Any = function
        if not callable(given):
            raise CheckpointError(
                f"a decomposition of {operator} must be a function, not {function!r}",
                remedy="Put @register_decomposition(...) above a function that takes the operator's arguments.",
            )
        table[operator] = function
        return function

    return enter


@contextmanager
def only_during() -> Iterator[None]:
    """Forgets afterwards what users registered within."""
    saved = dict(_users_after), dict(_users_before)
    try:
        yield
    finally:
        for table, old in zip((_users_after, _users_before), saved, strict=True):
            table.clear()
            table.update(old)


def after_autograd(*, optimize: bool = False, otherwise: Mapping[OpOverload, Rewrite] | None = None) -> dict[OpOverload, Rewrite]:
    """What decomposes operators of the joint graph: to be put on top of PyTorch's core table and its BatchNorm entries.

    With `optimize`, faster forms are used where a shape allows them. `otherwise` is the table below: it has the plain forms that are
    PyTorch's own.
    """
    table = dict(AFTER)
    if optimize:
        for operator, function in FAST.items():
            plain = table.get(operator) or (otherwise or {}).get(operator)
            table[operator] = _first_of(function, plain) if plain else function
    return {**table, **_users_after}


def _first_of(function: Rewrite, plain: Rewrite) -> Rewrite:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return plain(*args, **kwargs) if result is NotImplemented else result

    return call


def rewritten_before_autograd() -> dict[OpOverload, Rewrite]:
    return {**BEFORE, **_users_before}


class _Shared:
    """Something installed in tables of the process: the first to enter installs it, the last to leave restores what was there."""

    def __init__(self, install: Callable[[ExitStack], None]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._uses = 0
        self._installed = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._uses == 0:
                with ExitStack() as stack:
                    self._install(stack)
                    self._installed = stack.pop_all()
            self._uses += 1
        try:
            yield
        finally:
            with self._lock:
                self._uses -= 1
                if self._uses == 0:
                    self._installed.close()


_rewrites = _Shared(lambda stack: stack.enter_context(kernels_above_autograd(_with_fallback(rewritten_before_autograd()))))
_masks = _Shared(lambda stack: stack.enter_context(masks_as_given()))
_shapes = _Shared(lambda stack: stack.enter_context(shape_functions(SHAPES)))


@contextmanager
def before_autograd() -> Iterator[None]:
    """While this is open, operators whose forward must be rewritten are rewritten before autograd sees them.

    PyTorch's tables belong to the process, so threads and nested uses share the rewrites. Only code that is traced at that time sees
    them, not eager code.
    """
    with _shapes(), _rewrites():
        yield


@contextmanager
def while_exporting() -> Iterator[None]:
    """To be open around `torch.export.export`: shapes stay dynamic, and functions of PyTorch that branch on values do not."""
    with _shapes(), _masks(), Replacing(FUNCTIONS):
        yield


def _with_fallback(rewrites: Mapping[OpOverload, Rewrite]) -> dict[OpOverload, Rewrite]:
    return {operator: _or_native(operator, function) for operator, function in rewrites.items()}


def _or_native(operator: OpOverload, function: Rewrite) -> Rewrite:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return call_native(operator, *args, **kwargs) if result is NotImplemented else result

    return call
