"""The losses that `export_artifacts` takes: names, `torch.nn` modules, functions, or None where the module returns its loss itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...errors import CheckpointError

NAMES = ("cross_entropy", "mse", "bce_with_logits", "l1")

IGNORE_INDEX = -100
"""The default `ignore_index` of PyTorch's cross entropy."""

_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_LIKE_THE_OUTPUT = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss,
    nn.KLDivLoss, nn.SoftMarginLoss, nn.PoissonNLLLoss, nn.MultiLabelSoftMarginLoss,
)  # fmt: skip
"""Losses of `torch.nn` whose target has the shape and type of the output."""


@dataclass(frozen=True)
class Loss:
    """A loss: the function of (outputs, targets...), and the names of the targets. `whole`: it takes everything the module returns, not
    only the first tensor."""

    function: Callable[..., Any]
    targets: tuple[str, ...]
    required: int
    whole: bool
    example: Callable[[torch.Tensor], list[torch.Tensor]] | None = None
    """Targets that fit an output, where they can be told from it."""

    @property
    def module(self) -> nn.Module | None:
        return self.function if isinstance(self.function, nn.Module) else None


def find_loss(loss: Any, class_axis: int | None) -> Loss | None:
    """What the user asked for; None where the module itself returns the loss."""
    if class_axis is not None and loss != "cross_entropy":
        raise CheckpointError("class_axis is for loss='cross_entropy'", remedy="Leave it out.")
    if loss is None:
        return None
    if isinstance(loss, str):
        return _named(loss, class_axis)
    if isinstance(loss, type):
        raise CheckpointError(f"loss is the class {loss.__name__}", remedy=f"Pass an object: loss={loss.__name__}().")
    if not callable(loss):
        raise CheckpointError(
            f"loss is {type(loss).__name__}",
            remedy=f"Use one of {', '.join(NAMES)}, a function of (outputs, targets...), a torch.nn loss, or None.",
        )
    names, required = _signature(loss)
    example: Callable[[torch.Tensor], list[torch.Tensor]] | None = None
    if isinstance(loss, _CLASSES):
        example = _class_indices
    elif isinstance(loss, _LIKE_THE_OUTPUT):
        example = _like_output
    return Loss(
        loss, names, required, whole=not isinstance(loss, nn.Module) or type(loss).__module__ != nn.MSELoss.__module__, example=example
    )


def _named(name: str, class_axis: int | None) -> Loss:
    if name == "cross_entropy":
        return Loss(_CrossEntropy(class_axis), ("labels",), 1, whole=False, example=_CrossEntropy(class_axis).labels)
    functions: dict[str, Callable[..., Any]] = {"mse": F.mse_loss, "bce_with_logits": F.binary_cross_entropy_with_logits, "l1": F.l1_loss}
    if name not in functions:
        raise CheckpointError(
            f"no loss {name!r}", remedy=f"Use one of {', '.join(NAMES)}, a function of (outputs, targets...), a torch.nn loss, or None."
        )
    return Loss(functions[name], ("target",), 1, whole=False, example=_like_output)


@dataclass(frozen=True)
class _CrossEntropy:
    """PyTorch's cross entropy, with the classes on any axis."""

    class_axis: int | None

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.movedim(self._axis(output), 1), labels, ignore_index=IGNORE_INDEX)

    def labels(self, output: torch.Tensor) -> list[torch.Tensor]:
        axis = self._axis(output)
        return [torch.zeros([size for place, size in enumerate(output.shape) if place != axis], dtype=torch.int64)]

    def _axis(self, output: torch.Tensor) -> int:
        rank = output.dim()
        if rank < 2:
            raise CheckpointError(
                f"cross entropy needs an output with a batch and a class axis; this one has {rank} dimensions",
                remedy="Choose another loss, or return outputs of the shape batch x classes.",
            )
        if self.class_axis is None and rank > 2:
            raise CheckpointError(
                f"cross entropy over an output with {rank} dimensions can mean two things",
                remedy="Pass class_axis=1 (as torch.nn.functional.cross_entropy takes it: batch x classes x ...) "
                "or class_axis=-1 (language models: batch x sequence x classes).",
            )
        axis = 1 if self.class_axis is None else self.class_axis
        if not -rank <= axis < rank or axis % rank == 0:
            raise CheckpointError(
                f"class_axis={axis} is not a class axis of an output with {rank} dimensions",
                remedy="Axis 0 is the batch: use 1 or -1.",
            )
        return axis % rank


def _class_indices(output: torch.Tensor) -> list[torch.Tensor]:
    """As `torch.nn.CrossEntropyLoss` takes them: the classes are on axis 1, or on axis 0 of a single sample."""
    shape = list(output.shape)
    del shape[min(1, output.dim() - 1)]
    return [torch.zeros(shape, dtype=torch.int64)]


def _like_output(output: torch.Tensor) -> list[torch.Tensor]:
    return [torch.full_like(output, 0.5, requires_grad=False)]


def _signature(loss: Callable[..., Any]) -> tuple[tuple[str, ...], int]:
    """The names of the loss's targets, and how many of them it can't do without."""
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions in C have no signature
        return ("target",), 1
    positional = [item for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    if not positional and not any(item.kind is item.VAR_POSITIONAL for item in parameters):
        raise CheckpointError("the loss takes no outputs", remedy="Pass a function of (outputs, targets...).")
    targets = positional[1:]
    return tuple(item.name for item in targets), sum(item.default is item.empty for item in targets)


def named_targets(loss: Loss, examples: Sequence[Any]) -> dict[str, Any]:
    """The examples under the names of the loss's signature."""
    names = list(loss.targets) + [f"target{place}" for place in range(len(loss.targets), len(examples))]  # *targets
    return dict(zip(names, examples, strict=False))
