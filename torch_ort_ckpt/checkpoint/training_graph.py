"""`TrainingGraph`: what a trainer uses of an `OrtModule` beyond `nn.Module`.

A class of its own, so that training plain modules imports no onnx: modules are recognized by this class, not by `hasattr`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..storage.paths import PathLike
from .state import CheckpointState


class TrainingGraph(nn.Module):
    """A module that runs training artifacts. `OrtModule` is the only implementation."""

    seed: int
    draws: int
    """The seed of dropout, and the number of training runs that have used it."""

    @abstractmethod
    def seed_dropout(self, seed: int, draws: int = 0) -> None: ...

    @abstractmethod
    def fix_dimensions(self, dimensions: Mapping[str, int]) -> None: ...

    @abstractmethod
    def checkpoint(
        self, optimizer: Any = None, *, scheduler: Any = None, properties: Mapping[str, int | float | str] | None = None
    ) -> CheckpointState: ...

    @abstractmethod
    def load_checkpoint(
        self, state: CheckpointState | PathLike, optimizer: Any = None, *, scheduler: Any = None, strict: bool = True
    ) -> None: ...

    @abstractmethod
    def export_inference(self, path: PathLike, outputs: Sequence[str] | None = None) -> None: ...
