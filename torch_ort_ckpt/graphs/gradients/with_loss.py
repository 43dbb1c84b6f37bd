"""Stage 1: a module and its loss become one `nn.Module` that takes tensors only and returns the loss first, then the module's outputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError, UnsupportedError
from .losses import Loss, named_targets

MODULE = "module."
LOSS = "loss."
"""What the names of parameters begin with inside `WithLoss`: those of the user's module, and those of a loss that has some."""


@dataclass(frozen=True)
class Example:
    """Tensors to trace with, by the names that the graph's inputs get; and arguments that are not tensors, which stay as they are."""

    tensors: dict[str, torch.Tensor]
    fixed: dict[str, Any]
    targets: dict[str, torch.Tensor]


class WithLoss(nn.Module):
    """Takes the module's tensors, then those of the loss that are not the module's too, by position."""

    def __init__(self, module: nn.Module, loss: Loss | None, example: Example) -> None:
        super().__init__()
        self.module = module
        self.inputs = list(example.tensors)
        self.targets = list(example.targets)
        self.names = [*self.inputs, *(name for name in self.targets if name not in example.tensors)]
        self.fixed = example.fixed
        self.by_name = takes_names(module, [*example.tensors, *example.fixed])
        self.loss = loss.module if loss is not None else None
        self.function = loss
        self.outputs: list[int] | None = None
        """Which of the module's output tensors are returned after the loss; None: all."""

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = dict(zip(self.names, values, strict=True))
        result = self.call(named)
        outputs = list(tensors(result))
        if self.function is None:
            loss, first = outputs[0], 1
        else:
            given = [named[name] for name in self.targets]
            loss, first = self.function.function(result if self.function.whole else outputs[0], *given), 0
        wanted = range(first, len(outputs)) if self.outputs is None else self.outputs
        # Only the loss is differentiated.
        return (_scalar(loss), *(outputs[place].detach() for place in wanted))

    def call(self, named: Mapping[str, torch.Tensor]) -> Any:
        """What the user's module returns."""
        inputs = {name: named[name] for name in self.inputs}
        if self.by_name:
            return self.module(**inputs, **self.fixed)
        return self.module(*inputs.values(), **self.fixed)


def tensors(result: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module's result, in order."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from tensors(part)
    elif isinstance(result, Mapping):
        for part in result.values():
            yield from tensors(part)


def output_names(count: int) -> list[str]:
    """`output`, or `output0`, `output1`, ...: the names of the module's outputs."""
    return ["output"] if count == 1 else [f"output{index}" for index in range(count)]


def takes_names(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether the forward takes arguments of these names."""
    parameters = inspect.signature(module.forward).parameters
    if any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        return all(name not in parameters or parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY for name in names)
    named = {name for name, item in parameters.items() if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)}
    return named.issuperset(names)


def named_example(module: nn.Module, example: Any, targets: Any, loss: Loss | None) -> Example:
    """Sort the user's example into inputs of the module and targets of the loss.

    By position: what the module's forward does not take is the loss's. By name: a name that only the loss knows is the loss's.
    """
    rest: dict[str, Any] = {}
    if isinstance(example, Mapping):
        inputs = dict(example)
        known = _positional(module)[0]
        if loss is not None and not any(item.kind is item.VAR_KEYWORD for item in inspect.signature(module.forward).parameters.values()):
            rest = {name: inputs.pop(name) for name in list(inputs) if name in loss.targets and name not in known}
    else:
        values = [example] if isinstance(example, torch.Tensor) else list(example)
        names, required, open_ended = _positional(module)
        count = len(values) if open_ended else min(len(values), len(names))
        if loss is not None and targets is None and loss.example is None and len(values) == count and count - loss.required >= required:
            count -= loss.required  # the module can do without, the loss can't
        names += [f"input{index}" for index in range(len(names), count)]  # *args
        inputs = dict(zip(names, values[:count], strict=False))
        if values[count:]:
            if loss is None:
                raise CheckpointError(
                    f"{len(values)} example inputs, but the forward takes {count}",
                    remedy="Pass what the forward takes; targets need a loss=.",
                )
            rest = named_targets(loss, values[count:])
    if targets is not None:
        if loss is None:
            raise CheckpointError("example_targets without a loss", remedy="Give the module all its inputs as example_inputs.")
        given = targets if isinstance(targets, Mapping) else [targets] if isinstance(targets, torch.Tensor) else list(targets)
        rest = {**rest, **(given if isinstance(given, Mapping) else named_targets(loss, given))}
    if bad := [name for name, value in rest.items() if not isinstance(value, torch.Tensor)]:
        raise CheckpointError(
            f"the target {bad[0]!r} is {type(rest[bad[0]]).__name__}", remedy="Pass a tensor, or bind the value in the loss."
        )
    given_tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    if not given_tensors:
        raise CheckpointError("no example input is a tensor", field="example_inputs", remedy="Pass the tensors that the forward takes.")
    fixed = {name: value for name, value in inputs.items() if not isinstance(value, torch.Tensor)}
    return Example(given_tensors, fixed, rest)


def complete_targets(wrapped: WithLoss, example: Example, loss: Loss | None, result: Any) -> Example:
    """The example with targets that fit what the module returned, where none were given and the loss tells their shape."""
    if loss is None or len(example.targets) >= loss.required:
        return example
    missing = [name for name in loss.targets[: loss.required] if name not in example.targets]
    if all(name in example.tensors for name in missing):  # an input that module and loss share
        return Example(example.tensors, example.fixed, {name: example.tensors[name] for name in loss.targets[: loss.required]})
    first = next(tensors(result), None)
    if loss.example is None or first is None:
        raise CheckpointError(
            f"the loss needs an example of {', '.join(missing)}",
            field="example_inputs",
            remedy="Add it after the module's inputs, or pass example_targets=(...).",
        )
    return Example(example.tensors, example.fixed, named_targets(loss, loss.example(first)))


def _positional(module: nn.Module) -> tuple[list[str], int, bool]:
    """The names of the forward's arguments, how many are required, and whether it takes any number."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    named = [item for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    open_ended = any(item.kind is item.VAR_POSITIONAL for item in parameters)
    return [item.name for item in named], sum(item.default is item.empty for item in named), open_ended


def _scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise UnsupportedError(f"the loss is {type(loss).__name__}, not a tensor", remedy="Return a tensor with one element.")
    if loss.dim() and any(size != 1 for size in loss.shape):
        raise UnsupportedError(
            f"the loss has shape {[str(size) for size in loss.shape]}",
            remedy='Return one number: use loss.mean(), or reduction="mean". With loss=None, the module\'s first output must be its loss.',
        )
    return loss.reshape(()) if loss.dim() else loss
