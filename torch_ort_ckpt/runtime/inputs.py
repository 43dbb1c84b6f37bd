"""The user's inputs of a graph: put in order, checked, and converted where that is lossless."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..dtypes import short_name
from ..errors import CheckpointError, UnsupportedError
from ..graphs.description import TensorSpec

_STRIDED = torch.strided
_SHAPES_KEPT = 256


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
        and value.layout is _STRIDED
        and (differentiable or not value.requires_grad or spec.name in provided)
        and value.device == device
        else _converted(spec, value, device, differentiable or spec.name in provided)
        for spec, value in zip(specs, values, strict=True)
    ]


class ShapeCheck:
    """Compares shapes with those of the graph. Shapes that passed once are not checked again.

    With `any_batch`, inputs of a graph exported for one batch size may have another, the same for all: PyTorch can run it.
    """

    def __init__(self, specs: Sequence[TensorSpec], dimensions: Mapping[str, int]) -> None:
        self._specs, self._dimensions = list(specs), dict(dimensions)
        self._accepted: set[tuple[torch.Size, ...]] = set()

    def __call__(self, inputs: Sequence[torch.Tensor], any_batch: bool) -> None:
        if torch.compiler.is_compiling():  # sizes are symbols there
            return
        shapes = tuple([value.shape for value in inputs])
        try:
            if shapes in self._accepted:
                return
        except TypeError:  # symbols too, while PyTorch traces
            return
        self._look(shapes, any_batch)
        if len(self._accepted) >= _SHAPES_KEPT:
            self._accepted.clear()
        self._accepted.add(shapes)

    def _look(self, shapes: Sequence[torch.Size], any_batch: bool) -> None:
        known: dict[int | str, tuple[int, str]] = {}  # of symbolic dimensions, the first size seen
        for spec, shape in zip(self._specs, shapes, strict=True):
            wanted = spec.shape if spec.shape is not None else ("?",) * len(shape)
            if len(shape) != len(wanted):
                found = f"{len(shape)} dimension{'s' * (len(shape) != 1)}"
                raise CheckpointError(f"has {found} {list(shape)}, the graph takes {spec}", field=spec.name, remedy="Reshape it.")
            for axis, (size, name) in enumerate(zip(shape, wanted, strict=True)):
                fixed = self._dimensions.get(name) if isinstance(name, str) else name
                if isinstance(name, int) and axis == 0 and any_batch:
                    fixed = None
                first = (size, spec.name) if fixed is not None or name == "?" else known.setdefault(name, (size, spec.name))
                expected, why = (fixed, "") if fixed is not None else (first[0], f": {name!r} is {first[0]} in {first[1]!r}")
                if size == 0 and name != 0:
                    raise CheckpointError(
                        f"is empty {list(shape)}, and a graph can't run on an empty input",
                        field=spec.name,
                        remedy="Skip empty batches.",
                    )
                if expected > 0 and size != expected:
                    raise CheckpointError(
                        f"has size {size} in dimension {axis}, the graph takes {expected}{why}",
                        field=spec.name,
                        remedy=f"The graph takes: {', '.join(map(str, self._specs))}.",
                    )


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
    if spec.dtype is None:
        raise UnsupportedError(
            "has a type that PyTorch tensors don't support (strings, a sequence, or 4-bit numbers)",
            field=spec.name,
            remedy="Compute it outside the graph, and export a graph that takes numbers.",
        )
    value = given if isinstance(given, torch.Tensor) else _as_tensor(spec, given, device)
    if value.layout is not _STRIDED:
        raise UnsupportedError(f"is a {str(value.layout).removeprefix('torch.')} tensor", field=spec.name, remedy="Call .to_dense() first.")
    if value.requires_grad and torch.is_grad_enabled() and not differentiable:
        raise UnsupportedError(
            "requires a gradient, and the training graph computes none for its inputs",
            field=spec.name,
            remedy='Pass input.detach(), or use engine="torch".',
        )
    if value.device != device:
        raise CheckpointError(
            f"is on {value.device}, the model on {device}", field=spec.name, remedy=f"Call .to({str(device)!r}), or move the model."
        )
    if value.dtype == spec.dtype:
        return value if differentiable else value.detach()
    if _kind(value.dtype) != _kind(spec.dtype):
        raise CheckpointError(
            f"is {short_name(value.dtype)}, the graph takes {short_name(spec.dtype)}",
            field=spec.name,
            remedy=f"Convert it: .to(torch.{short_name(spec.dtype)}).",
        )
    converted = (value if differentiable else value.detach()).to(spec.dtype)
    if _kind(value.dtype) == "integer":
        _refuse_changed(spec, value, converted)
    return converted


def _as_tensor(spec: TensorSpec, given: Any, device: torch.device) -> torch.Tensor:
    reason = ""
    if isinstance(given, (np.ndarray, np.generic, int, float, bool, list)):
        try:
            return torch.as_tensor(given, device=device)
        except (TypeError, ValueError, RuntimeError) as error:  # strings, lists of unequal length, numbers beyond 64 bits
            reason = f" ({error})"
    raise CheckpointError(f"expected a tensor, not {type(given).__name__}{reason}", field=spec.name, remedy="Use torch.as_tensor(...).")


def _refuse_changed(spec: TensorSpec, value: torch.Tensor, converted: torch.Tensor) -> None:
    """Raise for integers that would overflow in the graph's type."""
    changed = (converted.to(value.dtype) != value) | ((converted < 0) != (value < 0))
    if bool(changed.any()):
        raise CheckpointError(
            f"holds {int(value[changed][0])}, which {short_name(converted.dtype)} can't",
            field=spec.name,
            remedy="Only numbers that fit the graph's type can be fed to it.",
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype is torch.bool else "integer"
