"""What the zoo knows of one architecture, and the pieces its tables are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

CLASSES = 5
VOCABULARY = 64

Batch = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One architecture: how to make it, its data, its loss.

    `batch(size, length)` gives the module's inputs and `targets(size, length)` those of the loss, both by name. `lengths` are the length of
    the example and another one; `sequence` says which axes of which inputs follow it.
    """

    name: str
    field: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    targets: Callable[[int, int], Batch]
    loss: Any = "cross_entropy"
    lengths: tuple[int, int] | None = None
    sequence: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    sizes: tuple[int, int] = (4, 6)
    dynamic: Mapping[str, Mapping[int, str]] | None = None
    """Dynamic dimensions where axis 0 of every input is not the batch; None: the default arguments do."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of `export_artifacts` that a user must give for this model."""

    def module(self) -> nn.Module:
        """The same weights every time."""
        torch.manual_seed(0)
        return self.make().train()

    def example(self, size: int, length: int | None = None) -> tuple[Batch, Batch]:
        """Inputs and targets, the same every time."""
        torch.manual_seed(1000 + size)
        length = length if length is not None else (self.lengths[0] if self.lengths else 0)
        return self.batch(size, length), self.targets(size, length)


def features(*shape: int, name: str = "x") -> Callable[[int, int], Batch]:
    """Floats of a fixed shape for each sample."""
    return lambda size, length: {name: torch.randn(size, *shape)}


def series(channels: int, name: str = "x") -> Callable[[int, int], Batch]:
    """Batch x time x channels."""
    return lambda size, length: {name: torch.randn(size, length, channels)}


def waves(channels: int = 1, name: str = "x") -> Callable[[int, int], Batch]:
    """Batch x channels x time."""
    return lambda size, length: {name: torch.randn(size, channels, length)}


def tokens(name: str = "input_ids", vocabulary: int = VOCABULARY) -> Callable[[int, int], Batch]:
    """Batch x sequence of token numbers, without the first few, which models use for padding and the like."""
    return lambda size, length: {name: torch.randint(4, vocabulary, (size, length))}


def classes(count: int = CLASSES, name: str = "labels", *shape: int) -> Callable[[int, int], Batch]:
    return lambda size, length: {name: torch.randint(0, count, (size, *shape))}


def token_labels(count: int = VOCABULARY, name: str = "labels") -> Callable[[int, int], Batch]:
    """A class for each position, some of which don't count."""

    def make(size: int, length: int) -> Batch:
        labels = torch.randint(4, count, (size, length))
        labels[:, 0] = -100
        return {name: labels}

    return make


def values(*shape: int, name: str = "target") -> Callable[[int, int], Batch]:
    return lambda size, length: {name: torch.randn(size, *shape)}


def nothing(size: int, length: int) -> Batch:
    """Targets of a module that returns its loss."""
    return {}


def both(*parts: Callable[[int, int], Batch]) -> Callable[[int, int], Batch]:
    """Several inputs."""
    return lambda size, length: {name: value for part in parts for name, value in part(size, length).items()}


def language_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy over every position of a language model's logits."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
