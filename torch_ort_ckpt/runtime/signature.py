"""The signature of `OrtModule.forward`: per instance, the inputs of its graph.

Trainers look at it. transformers.Trainer drops the columns of a data set that `forward` does not name, and takes `**kwargs` as a sign
that the model divides its loss by the accumulated batch itself; for one that does not, gradients would be too large.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Sequence
from keyword import iskeyword
from types import FunctionType, MethodType
from typing import Any

import torch

_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
_OF_THE_CLASS = inspect.Signature(
    [
        _SELF,
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("labels", inspect.Parameter.KEYWORD_ONLY, default=None),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)
"""transformers.Trainer looks in the class, not in the instance, for the names of labels; without them it reports no `eval_loss`."""


class InputNames:
    """The inputs of one module's graph, and `forward` as a function that has them in its signature. Pickles as the names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._forward: FunctionType | None = None

    def signed(self, function: FunctionType) -> FunctionType:
        """A copy of the function with these names; the same one each time, so that bound methods compare equal."""
        if self._forward is None:
            made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
            functools.update_wrapper(made, function)
            del made.__wrapped__  # type: ignore[attr-defined]  # `inspect` would look there
            made.__signature__ = inspect.Signature([_SELF, *_parameters(self._names)])  # type: ignore[attr-defined]
            self._forward = made
        return self._forward

    def __reduce__(self) -> tuple[Any, ...]:
        return InputNames, (self._names,)


class shows_inputs:  # a decorator
    """A method whose signature, seen from an instance, has the names in the instance's `_input_names`."""

    def __init__(self, function: Any) -> None:
        function.__signature__ = _OF_THE_CLASS
        self._function: FunctionType = function

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self._function
        if torch.compiler.is_compiling():  # it traces ordinary methods only
            return module._forward
        return MethodType(module._input_names.signed(self._function), module)


def _parameters(names: Sequence[str]) -> list[inspect.Parameter]:
    """One for each input. A name that Python can't spell (`input.1`) is by position only, as are then all before it."""
    spelled, taken = list[str](), {"self"}
    for name in names:
        word = re.sub(r"\W", "_", name, flags=re.ASCII)
        word = f"_{word}" if not word.isidentifier() or iskeyword(word) else word
        while word in taken:
            word += "_"
        taken.add(word)
        spelled.append(word)
    last = max((place for place, name in enumerate(names) if spelled[place] != name), default=-1)
    kinds = [inspect.Parameter.POSITIONAL_ONLY if place <= last else inspect.Parameter.POSITIONAL_OR_KEYWORD for place in range(len(names))]
    return [inspect.Parameter(word, kind, annotation=torch.Tensor) for word, kind in zip(spelled, kinds, strict=True)]
