"""What the user passes to a graph: put in order, checked, and converted where that loses nothing."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..dtypes import short_name
from ..errors import CheckpointError, UnsupportedError
from ..graphs import TensorSpec


def ordered_inputs(
    specs: Sequence[TensorSpec],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
    *,
    differentiable: bool = False,
    provided: Container[str] = (),
) -> list[torch.Tensor]:
    """The graph's inputs from positional arguments, keywords, or one mapping (a batch as a dict). They stay attached to autograd
    where the engine is `differentiable`, or the graph has a gradient for them (`provided`)."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        values = _merge(specs, (), args[0])
    else:
        values = _merge(specs, args, kwargs) if kwargs or len(args) != len(specs) else list(args)
    return [
        value
        if type(value) is torch.Tensor
        and value.dtype is spec.dtype
        and (differentiable or not value.requires_grad or spec.name in provided)
        and value.device.type == device.type
        else _converted(spec, value, device, differentiable or spec.name in provided)
        for spec, value in zip(specs, values, strict=True)
    ]


def _merge(specs: Sequence[TensorSpec], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    names = [spec.name for spec in specs]
    if len(args) > len(specs):
        raise CheckpointError(f"{len(args)} inputs, the graph takes {len(specs)}", remedy=f"They are: {', '.join(map(str, specs))}.")
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            raise CheckpointError(f"the graph has no input {name!r}", field=name, remedy=f"It takes: {', '.join(names)}.")
        if name in given:
            raise CheckpointError("given twice", field=name, remedy="Pass it by position or by name.")
        given[name] = value
    if missing := [str(spec) for spec in specs if spec.name not in given]:
        raise CheckpointError(f"inputs missing: {', '.join(missing)}", remedy=f"The graph takes: {', '.join(names)}.")
    return [given[name] for name in names]


def _converted(spec: TensorSpec, given: Any, device: torch.device, differentiable: bool) -> torch.Tensor:
    if not isinstance(given, (torch.Tensor, np.ndarray, np.generic, int, float, bool, list)):
        raise CheckpointError(f"expected a tensor, not {type(given).__name__}", field=spec.name, remedy="Use torch.as_tensor(...).")
    value: torch.Tensor = given if isinstance(given, torch.Tensor) else torch.as_tensor(given, device=device)
    if value.requires_grad and torch.is_grad_enabled() and not differentiable:
        raise UnsupportedError(
            "requires a gradient, and the training graph computes none for its inputs",
            field=spec.name,
            remedy='Pass input.detach(), or use engine="torch".',
        )
    if value.device.type != device.type:
        raise CheckpointError(
            f"is on {value.device}, the model on {device}", field=spec.name, remedy=f"Call .to({str(device)!r}), or move the model."
        )
    if value.dtype == spec.dtype or spec.dtype is None:
        return value if differentiable else value.detach()
    if _kind(value.dtype) != _kind(spec.dtype):
        raise CheckpointError(
            f"is {short_name(value.dtype)}, the graph takes {short_name(spec.dtype)}",
            field=spec.name,
            remedy=f"Convert it: .to(torch.{short_name(spec.dtype)}).",
        )
    return (value if differentiable else value.detach()).to(spec.dtype)


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype is torch.bool else "integer"
