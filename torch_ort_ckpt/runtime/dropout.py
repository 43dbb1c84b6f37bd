"""Seeds for the random numbers of a graph, so that a resumed run draws what the interrupted one would have drawn."""

from __future__ import annotations

import threading

import torch


class DropoutSeeds:
    """One seed for each training run, from a base seed and the number of runs so far.

    Without a seed of its own the base is PyTorch's, and follows `torch.manual_seed`.
    """

    def __init__(self, seed: int | None) -> None:
        self._follows_torch = seed is None
        self._lock = threading.Lock()
        self.set(_torch_seed() if seed is None else seed)

    def set(self, base: int, draws: int = 0) -> None:
        self.base, self.draws = base, draws
        self._torch_seed = _torch_seed()

    def next(self) -> int:
        with self._lock:
            if self._follows_torch and _torch_seed() != self._torch_seed:  # torch.manual_seed was called since
                self.set(_torch_seed())
            self.draws += 1
            return _mix(self.base + self.draws * 0x9E3779B97F4A7C15)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


def _torch_seed() -> int:
    """PyTorch's seed as a checkpoint's properties can hold it (63 bits)."""
    return torch.initial_seed() & ((1 << 63) - 1)


def _mix(number: int) -> int:
    """Spreads nearby numbers over 63 bits (the finalizer of splitmix64)."""
    number &= (1 << 64) - 1
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (number ^ (number >> 31)) >> 1
