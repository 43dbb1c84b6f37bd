"""Histograms of tensors that may not fit in memory as float64: counted piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

BINS = 24
CHUNK = 1 << 22


def histogram(value: torch.Tensor, low: float, high: float) -> list[int] | None:
    """The number of finite elements in each of `BINS` equal bins from `low` to `high`; None if there is no range."""
    if not low < high:
        return None
    flat = value.detach().reshape(-1)
    return _count(lambda: (_double(flat, start) for start in range(0, flat.numel(), CHUNK)), low, high)


def histogram_of_difference(a: torch.Tensor, b: torch.Tensor) -> list[int] | None:
    """The histogram of `b - a`, symmetric around zero so that a shift is visible."""
    flat_a, flat_b = a.detach().reshape(-1), b.detach().reshape(-1)

    def pieces() -> Iterator[torch.Tensor]:
        return (_double(flat_b, start) - _double(flat_a, start) for start in range(0, flat_a.numel(), CHUNK))

    reach = max((float(good.abs().max()) for piece in pieces() if (good := piece[piece.isfinite()]).numel()), default=0.0)
    return _count(pieces, -reach, reach) if reach else None


def _count(pieces: Callable[[], Iterator[torch.Tensor]], low: float, high: float) -> list[int]:
    counts = torch.zeros(BINS, dtype=torch.int64)
    for piece in pieces():
        good = piece[piece.isfinite()]
        # Divided before subtracting: the range of two huge numbers of opposite sign overflows.
        place = (good / 2 - low / 2) / (high / 2 - low / 2) * BINS
        counts += torch.bincount(place.clamp(0, BINS - 1).to(torch.int64), minlength=BINS)
    return [int(count) for count in counts]


def _double(flat: torch.Tensor, start: int) -> torch.Tensor:
    return flat[start : start + CHUNK].cpu().to(torch.float64)
