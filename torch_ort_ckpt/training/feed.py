"""`Feed`: endless batches from any loader, with a position that can be saved and restored, also in the middle of an epoch.

| loader | how the position is restored |
|---|---|
| has `state_dict` / `load_state_dict` (torchdata's `StatefulDataLoader`) | by the loader itself |
| draws from a `ResumableSampler` | the sampler starts there; nothing is read twice |
| any other | the epoch restarts from its initial random state, and the batches already used are drawn again and dropped |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import CheckpointError
from .distributed import world_size
from .randomness import random_states, set_random_states
from .sampler import ResumableSampler


class Feed:
    """Iterates over the loader epoch after epoch. `epoch` counts full passes, `batch` the batches used of the current one."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.epoch = self.batch = 0
        self._begun = 0  # samples of the epoch, over all ranks, that were done when this iteration of the loader began
        self._random: dict[str, Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._resumed: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = self._begin()
        try:
            value = next(self._iterator)
        except StopIteration:
            if self.batch == 0 and self._begun == 0:
                raise CheckpointError(
                    "the training loader yields no batch", remedy="Is the data set empty, or smaller than a batch?"
                ) from None
            self.epoch, self.batch, self._begun = self.epoch + 1, 0, 0
            self._iterator = self._begin()
            return next(self)
        self.batch += 1
        return value

    @property
    def samples(self) -> int:
        """Samples of the current epoch done over all ranks (batches, where the loader's batch size is unknown)."""
        return self._begun + self.batch * (_batch_size(self.loader) or 1) * world_size()

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, for a checkpoint."""
        if self._resumed is not None:  # state loaded, and no batch drawn since
            return dict(self._resumed)
        own = getattr(self.loader, "state_dict", None)
        return {
            "begun": self._iterator is not None,
            "epoch": self.epoch,
            "batch": self.batch,
            "samples": self.samples,
            "ranks": world_size(),
            "random": self._random,
            "loader": own() if own is not None and self._iterator is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there; takes effect at the next batch."""
        self.epoch, self.batch, self._begun = int(state["epoch"]), 0, 0
        self._iterator, self._resumed = None, dict(state) if state["begun"] else None

    def _begin(self) -> Iterator[Any]:
        state, self._resumed = self._resumed, None
        sampler = getattr(self.loader, "sampler", None)
        if state is None:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)  # type: ignore[union-attr]  # just seen
            self._random = random_states() if not isinstance(sampler, ResumableSampler) else None
            return iter(self.loader)
        # Creating an iterator draws random numbers. This was done when the epoch began and must not happen twice.
        now = random_states()
        try:
            return self._resume(state, sampler)
        finally:
            set_random_states(now)

    def _resume(self, state: Mapping[str, Any], sampler: Any) -> Iterator[Any]:
        self._random = state["random"]
        if state["loader"] is not None and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(state["loader"])
            self.batch = int(state["batch"])
            return iter(self.loader)
        if isinstance(sampler, ResumableSampler):
            sampler.set_epoch(self.epoch, int(state["samples"]))
            self._begun = int(state["samples"])
            return iter(self.loader)
        if int(state["ranks"]) != world_size() and state["batch"]:
            raise CheckpointError(
                f"saved inside an epoch with {state['ranks']} ranks; this loader's position does not carry over to {world_size()}",
                remedy="Use a ResumableSampler.",
            )
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        if state["random"] is not None:
            set_random_states(state["random"])
        iterator = iter(self.loader)
        for self.batch in range(1, int(state["batch"]) + 1):  # counts the used batches as they are drawn again
            next(iterator)
        return iterator


def _batch_size(loader: Any) -> int | None:
    found = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return int(found) if found else None
