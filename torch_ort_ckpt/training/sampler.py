"""`ResumableSampler`: the samples of this rank, in an order that depends only on seed and epoch, from any position.

All ranks walk one common order, rank r taking every `ranks`-th sample from r on. So after n batches everywhere, the first
n x batch x ranks samples are done, whatever the number of ranks: that number is the position, and another number of ranks can continue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from ..errors import CheckpointError, UnsupportedError
from .distributed import rank, world_size


class ResumableSampler(Sampler[int]):
    """Pass it as `DataLoader(dataset, sampler=...)`. Ranks are those of the process group unless given.

    With `drop_last=False` the last round is filled up from the start of the order, so that all ranks draw equally often.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank_: int | None = None,
        ranks: int | None = None,
    ) -> None:
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.rank = rank() if rank_ is None else rank_
        self.ranks = world_size() if ranks is None else ranks
        self.epoch = self.position = 0
        if not 0 <= self.rank < self.ranks:
            raise CheckpointError(f"rank {self.rank} of {self.ranks}", field="rank")
        if self.length < 1:
            raise CheckpointError("an empty data set", field="dataset")

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Begin `epoch` at `position`: that many samples of it, over all ranks, are done."""
        self.epoch, self.position = epoch, position

    def __iter__(self) -> Iterator[int]:
        order = self.order()
        for index in range(self.position + self.rank, len(order), self.ranks):
            yield order[index]

    def __len__(self) -> int:
        return max(0, -(-(self.total - self.position - self.rank) // self.ranks))

    @property
    def total(self) -> int:
        """Samples of an epoch over all ranks, filled up or cut to a multiple of their number."""
        remaining = self.length - self.position
        rounds = remaining // self.ranks if self.drop_last else -(-remaining // self.ranks)
        return self.position + rounds * self.ranks

    def order(self) -> list[int]:
        """The indices of this epoch, in the order in which they are drawn."""
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            found = torch.randperm(self.length, generator=generator).tolist()
        else:
            found = list(range(self.length))
        while len(found) < self.total:
            found += found[: self.total - len(found)]
        return found[: self.total]


def sharded(loader: DataLoader[object], seed: int = 0) -> DataLoader[object]:
    """The same loader, drawing this rank's share. Loaders with a distributed or resumable sampler are returned as they are."""
    sampler = loader.sampler
    if world_size() == 1 or isinstance(loader.dataset, IterableDataset) or hasattr(sampler, "set_epoch"):
        return loader
    batches = loader.batch_sampler
    if not isinstance(sampler, (RandomSampler, SequentialSampler)) or (batches is not None and type(batches) is not BatchSampler):
        raise UnsupportedError(
            f"a loader with a {type(sampler).__name__} gives every rank the same data",
            remedy="Use a ResumableSampler or a DistributedSampler.",
        )
    options = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    }
    if loader.num_workers:
        options |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    own = ResumableSampler(loader.dataset, shuffle=isinstance(sampler, RandomSampler), seed=seed)  # type: ignore[arg-type]  # map-style: sized
    return DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=own, drop_last=loader.drop_last, **options)
