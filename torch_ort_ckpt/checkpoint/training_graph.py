"""`TrainingGraph` and `GraphOptimizer`: what a trainer uses of an `OrtModule` and an `OrtOptimizer` beyond what PyTorch's classes have.

Classes of their own, so that training plain modules imports no onnx: modules are recognized by their class, not by `hasattr`, and found
inside what PyTorch wraps around them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..pytorch_private import compiled_module
from ..storage.paths import PathLike
from .state import CheckpointState, OptimizerGroup, OptimizerSpec

WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


class TrainingGraph(nn.Module):
    """A module that runs training artifacts. `OrtModule` is the only implementation."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """The seed of dropout."""

    @property
    @abstractmethod
    def draws(self) -> int:
        """The number of training runs that have used the seed."""

    @property
    @abstractmethod
    def optimizer_spec(self) -> OptimizerSpec | None:
        """The hyper-parameters of the optimizer graph; None if the artifacts have none."""

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
    def export_inference(self, path: PathLike, outputs: Sequence[str] | None = None, *, overwrite: bool = False) -> None: ...


class GraphOptimizer(Optimizer):
    """An optimizer that runs the optimizer graph of a `TrainingGraph`. `OrtOptimizer` is the only implementation."""

    updated: bool
    """Whether the last step changed the parameters."""

    @abstractmethod
    def groups(self) -> dict[str, OptimizerGroup]: ...

    @abstractmethod
    def load_groups(self, groups: Mapping[str, OptimizerGroup]) -> None: ...


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside DistributedDataParallel, DataParallel and `torch.compile` (FSDP2 wraps nothing)."""
    while True:
        inner = model.module if isinstance(model, WRAPPERS) else compiled_module(model)
        if inner is None:
            return model
        model = inner


def only_graph(model: nn.Module) -> TrainingGraph | None:
    """The one training graph in a module, however it is wrapped; None if there is none, or more than one."""
    found = [module for module in model.modules() if isinstance(module, TrainingGraph)]
    return found[0] if len(found) == 1 else None
