"""PyTorch's private names that the decompositions need, each with its reason.

PyTorch has no public way to replace an operator above autograd while a graph is traced, nor to correct the shape that a fake tensor gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey  # the keys under which kernels in Python are kept
from torch._ops import OpOverload  # the class of torch.ops.aten.add.Tensor; it has no public name
from torch._subclasses import fake_impls  # the shape functions of fake tensors
from torch.overrides import TorchFunctionMode

__all__ = ["OpOverload", "Replacing", "Rewrite", "call_native", "kernels_above_autograd", "masks_as_given", "shape_functions"]

Rewrite = Callable[..., Any]


@contextmanager
def kernels_above_autograd(rewrites: Mapping[OpOverload, Rewrite]) -> Iterator[None]:
    """Lets PyTorch's Python dispatcher, which is on while a graph is traced, call these functions where autograd would see the operator.

    `OpOverload.py_impl` is what PyTorch's own decompositions use for that; `py_kernels` is the table behind it, needed to undo it.
    """
    saved: dict[OpOverload, dict[Any, Any]] = {}
    try:
        for operator, function in rewrites.items():
            saved[operator] = dict(operator.py_kernels)
            # An operator that PyTorch itself composes of others is looked up under the first key, any other under the second.
            keys = [DispatchKey.CompositeImplicitAutograd] if is_composite(operator) else []
            for key in [*keys, DispatchKey.Autograd]:
                operator.py_kernels.pop(key, None)
                operator.py_impl(key)(function)
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, kernels in saved.items():
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def is_composite(operator: OpOverload) -> bool:
    """Whether PyTorch composes the operator of others above autograd (CompositeImplicitAutograd)."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), DispatchKey.CompositeImplicitAutograd))


def call_native(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The operator with PyTorch's own kernel and autograd, from within a function that replaces it."""
    key = DispatchKey.CompositeImplicitAutograd if is_composite(operator) else DispatchKey.Autograd
    return operator._op_dk(key, *args, **kwargs)


@contextmanager
def shape_functions(functions: Mapping[OpOverload, Rewrite]) -> Iterator[None]:
    """Gives fake tensors another shape function for these operators, where PyTorch's own turns a dynamic size into a number."""
    table = fake_impls.op_implementations_dict
    saved = {operator: table.get(operator) for operator in functions}
    try:
        table.update(functions)
        yield
    finally:
        for operator, function in saved.items():
            if function is None:
                table.pop(operator, None)
            else:
                table[operator] = function


@contextmanager
def masks_as_given() -> Iterator[None]:
    """While it is open, `nn.Transformer` and its parts do not look at a mask's values to find out whether it is causal, which can't be
    captured. They apply it as it is, which gives the same result. Where PyTorch has no such function any more, nothing happens."""
    module: Any = torch.nn.modules.transformer
    native = getattr(module, "_detect_is_causal_mask", None)
    if native is None:
        yield
        return
    module._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        module._detect_is_causal_mask = native


class Replacing(TorchFunctionMode):
    """While it is entered, this thread calls other functions instead of some of PyTorch's. (The class is public.)"""

    def __init__(self, functions: Mapping[Callable[..., Any], Rewrite]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._functions.get(function, function)(*args, **(kwargs or {}))
