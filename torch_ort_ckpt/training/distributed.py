"""The process group as the trainer uses it: rank, agreement and failures of all ranks. Built on `torch.distributed`.

Without a process group everything works as one rank without communication.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.training_graph import WRAPPERS
from ..cuda.devices import process_group_backend
from ..errors import CheckpointError
from ..pytorch_private import is_distributed

T = TypeVar("T")


def start() -> bool:
    """Join the process group that `torchrun` describes; False if there is none to join. A rank's GPU becomes the current one; ranks
    beyond the GPUs, which train on the CPU, have none."""
    if dist.is_initialized():
        return True
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available() and local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    dist.init_process_group(process_group_backend())
    return True


def stop() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_sharded(model: nn.Module) -> bool:
    """Whether the parameters are sharded, by FSDP2 or anything else that uses DTensors."""
    return any(is_distributed(parameter) for parameter in model.parameters())


def data_parallel(model: nn.Module, **options: Any) -> nn.Module:
    """The model in DistributedDataParallel, unless there is one rank, it is already wrapped, or it has no trainable parameters."""
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if world_size() == 1 or isinstance(model, WRAPPERS) or is_sharded(model) or not trains:
        return model
    device = next(model.parameters()).device
    ids = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, **options)


@dataclass
class Ranks:
    """A group of ranks. `own_group()` returns one whose messages are separate from those of training."""

    group: Any = None

    @classmethod
    def own_group(cls) -> Ranks:
        return cls(dist.new_group(backend="gloo") if world_size() > 1 else None)

    @property
    def rank(self) -> int:
        return rank()

    @property
    def count(self) -> int:
        return world_size()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        with _lost_ranks():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""
        if self.count == 1:
            return flag
        value = torch.tensor([int(flag)])
        with _lost_ranks():
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return bool(value.item())

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        if self.count == 1:
            return values
        total = values.clone()
        with _lost_ranks():
            dist.all_reduce(total, group=self.group)
        return total / self.count

    def together(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; returns all results, or raises the same error on all ranks."""
        result: Any = None
        problem: CheckpointError | None = None
        try:
            result = action()
        except CheckpointError as error:
            problem = error
        except OSError as error:
            problem = CheckpointError(error.strerror or str(error), path=error.filename)
        answers = self.gather((result, str(problem) if problem else None))
        if problem is not None:
            raise problem
        for number, (_, text) in enumerate(answers):
            if text is not None:
                raise CheckpointError(f"rank {number} failed: {text}", remedy="See the output of that rank.")
        return [answer for answer, _ in answers]

    def first(self, action: Callable[[], T]) -> T:
        """Run `action` on the first rank only; returns its result, or raises its error, on all ranks."""
        return self.together(lambda: action() if self.rank == 0 else None)[0]  # type: ignore[return-value]  # rank 0's is a T


@contextmanager
def _lost_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # raised by gloo and NCCL for a dead peer
        raise CheckpointError(
            f"lost contact with another rank ({str(error).splitlines()[0][:200]})",
            remedy="A rank has failed: see its own error. Restart the job to resume from the newest checkpoint.",
        ) from error
