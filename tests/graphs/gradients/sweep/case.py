"""A small network with a scalar loss, made of one layer, loss or function of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """`inputs(batch)` makes a batch of that size; `module` takes it and returns a loss."""

    name: str
    module: Callable[[], nn.Module]
    inputs: Callable[[int], Tensors]
    ordinary: bool = False
    """Whether it belongs to the small part that runs every time."""
    axes: tuple[int, ...] = (0,)
    """The dynamic axes of each input; their size is that of the batch."""


class Curved(nn.Module):
    """A layer between a trainable scale of its input and a loss that is not linear in its output, so that the gradient of its input shows
    in that of the scale."""

    def __init__(self, layer: Callable[..., Any], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        result = self.layer(x * self.scale, *others)
        while isinstance(result, tuple):
            result = result[0]
        return curved(result)


def curved(x: torch.Tensor) -> torch.Tensor:
    """A loss that weights every element of the last axis otherwise: the sum of a normalized output, or of its squares, has no gradient."""
    x = x.unsqueeze(1) if x.dim() == 1 else x
    weights = torch.linspace(0.5, 1.5, x.shape[-1])
    return (torch.sin(x * weights) + x * x * weights).mean()


class Judged(nn.Module):
    """A loss function on a trainable scale of its input."""

    def __init__(self, loss: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.loss = loss
        self.scale = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        return self.loss(x * self.scale, *targets)


def layer(name: str, make: Callable[[], Callable[..., Any]], *shape: int, ordinary: bool = False, kind: str = "normal") -> Case:
    def inputs(batch: int) -> Tensors:
        if kind == "positive":
            return (torch.rand(batch, *shape) * 0.8 + 0.1,)
        return (torch.randn(batch, *shape),)

    return Case(name, lambda: Curved(make(), shape), inputs, ordinary)


def loss(
    name: str,
    make: Callable[[], Callable[..., torch.Tensor]],
    shape: tuple[int, ...],
    target: Callable[[int], Any],
    kind: str = "normal",
    ordinary: bool = False,
) -> Case:
    def inputs(batch: int) -> Tensors:
        x = torch.rand(batch, *shape) * 0.6 + 0.05 if kind == "probability" else torch.randn(batch, *shape)
        targets = target(batch)
        return (x, *targets) if isinstance(targets, tuple) else (x, targets)

    return Case(name, lambda: Judged(make(), shape), inputs, ordinary)
