"""Gradients of a step without autograd, put where PyTorch's optimizers look for them."""

from __future__ import annotations

import threading
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ..pytorch_private import foreach_add_

_requires_grad = attrgetter("requires_grad")


class Loop:
    """State kept between steps. Not attributes of the module, where setting one takes ten times as long."""

    def __init__(self, overwrite: bool = False) -> None:
        self.lock = threading.RLock()  # gradients of a step must be in place before another thread's step may use their memory
        self.overwrite = overwrite  # lazy_reset_grad was called
        self.gradients: Any = None  # of the last train_step

    def __reduce__(self) -> tuple[object, ...]:
        return Loop, (self.overwrite,)

    def reset(self, model: nn.Module) -> None:
        """Carry out what `lazy_reset_grad` asked for, where gradients can't be overwritten."""
        if self.overwrite:
            model.zero_grad()
            self.overwrite = False

    @property
    def unneeded(self) -> Any:
        """The gradients of the last step, if they are to be overwritten."""
        return self.gradients if self.overwrite else None

    def deliver(self, parameters: list[torch.Tensor], gradients: Any) -> None:
        """Add gradients to `.grad`, or assign them if it is None or to be overwritten."""
        if self.overwrite and not all(map(_requires_grad, parameters)):
            for parameter in parameters:
                if not parameter.requires_grad:  # frozen since: without a gradient, an optimizer skips it
                    parameter.grad = None
        pairs = [pair for pair in zip(parameters, gradients, strict=True) if pair[0].grad is not pair[1]]
        if self.overwrite and pairs:
            written = {id(parameter) for parameter, gradient in zip(parameters, gradients, strict=True) if parameter.grad is gradient}
            for parameter, _ in pairs:
                if id(parameter) not in written:  # a tied parameter has several gradients, one of them is already in place
                    parameter.grad = None
        old, new = [], []
        for parameter, gradient in pairs:
            current = parameter.grad
            if not parameter.requires_grad:
                continue
            if current is None:
                parameter.grad = gradient
            else:
                old.append(current)
                new.append(gradient)
        add_each(old, new)
        self.gradients, self.overwrite = gradients, False


def add_each(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Add each to its tensor. One kernel does it for all, so a tensor that stands twice in the list (the gradient of a tied parameter) gets
    its second part in a second call: CUDA's kernel would lose one of the two."""
    while tensors:
        first: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        again: list[tuple[torch.Tensor, torch.Tensor]] = []
        for pair in zip(tensors, others, strict=True):
            if first.setdefault(id(pair[0]), pair) is not pair:
                again.append(pair)
        foreach_add_([tensor for tensor, _ in first.values()], [other for _, other in first.values()])
        tensors, others = [tensor for tensor, _ in again], [other for _, other in again]


def through_computed(parameters: list[torch.Tensor], gradients: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Propagate the gradients of computed parameters to what they are computed from; returns the other parameters and gradients."""
    pairs = list(zip(parameters, gradients, strict=True))
    if computed := [pair for pair in pairs if not pair[0].is_leaf]:
        torch.autograd.backward([value for value, _ in computed], [gradient.clone() for _, gradient in computed])
    kept = [pair for pair in pairs if pair[0].is_leaf]
    return [value for value, _ in kept], [gradient for _, gradient in kept]
