"""What is in a checkpoint, as plain data: the function behind `torch-ort-ckpt inspect`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoint.backing import release_pages
from ..checkpoint.state import CheckpointState, Value, is_string, nbytes
from ..dtypes import short_name
from ..formats import detect, load, read_by
from ..storage.files import Progress
from ..storage.paths import PathLike

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Statistics:
    """Of the finite elements; `nan` and `inf` count the others."""

    minimum: float
    maximum: float
    mean: float
    std: float
    norm: float
    zeros: int
    nan: int
    inf: int


@dataclass(frozen=True)
class TensorSummary:
    name: str
    kind: str  # trainable, frozen or alias
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    moments: tuple[str, ...]
    statistics: Statistics | None


@dataclass
class Summary:
    """One checkpoint."""

    path: str
    format: str
    format_version: int | None
    nominal: bool
    tensors: list[TensorSummary]
    groups: dict[str, dict[str, Any]]
    properties: dict[str, int | float | str]
    partitions: dict[str, Any]
    read_by: str
    """The ORT releases that can read this file as it is, and why others can't."""

    @property
    def total_bytes(self) -> int:
        return sum(item.nbytes for item in self.tensors) + sum(int(group["nbytes"]) for group in self.groups.values())


def summarize(
    path: PathLike, *, format: str | None = None, statistics: bool = True, progress: Progress | None = None, **options: Any
) -> Summary:
    """Describe a checkpoint. Without `statistics` only the structure is read."""
    name = format or detect(path)
    state = load(path, format=name, **options)
    moments: dict[str, set[str]] = {}
    for group in state.optimizer.values():
        for param, states in group.states.items():
            moments.setdefault(param, set()).update(states)
    tensors = []
    for kind, values in (("trainable", state.trainable), ("frozen", state.frozen), ("alias", state.mixed_precision)):
        for param, value in sorted(values.items()):
            found = measure(value) if statistics else None
            own = tuple(sorted(moments.get(param, ()))) if kind != "alias" else ()
            dtype = "string" if is_string(value) else short_name(value.dtype)
            tensors.append(TensorSummary(param, kind, dtype, tuple(value.shape), nbytes(value), own, found))
            release_pages(state)
            if progress:
                progress(nbytes(value))
    return Summary(
        path=str(path),
        format=name,
        format_version=state.format_version,
        nominal=state.nominal,
        tensors=tensors,
        groups=_groups(state),
        properties=dict(state.properties),
        partitions=dict(state.partitions),
        read_by=read_by(name, path),
    )


def _groups(state: CheckpointState) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "step": group.step,
            "initial_lr": group.initial_lr,
            "lr": group.lr,
            "parameters": len(group.states),
            "moments": sorted({moment for states in group.states.values() for moment in states}),
            "nbytes": sum(nbytes(value) for states in group.states.values() for value in states.values()),
            "hyperparameters": group.hyperparameters,
        }
        for name, group in state.optimizer.items()
    }


def measure(value: Value) -> Statistics | None:
    """Statistics in float64, piece by piece; None where there are no numbers."""
    if is_string(value) or value.is_meta or value.numel() == 0:
        return None
    flat = value.detach().reshape(-1)
    low, high, total, squares = math.inf, -math.inf, 0.0, 0.0
    count = zeros = nan = inf = 0
    for start in range(0, flat.numel(), _CHUNK):
        piece = flat[start : start + _CHUNK].cpu().to(torch.float64)
        good = piece[piece.isfinite()]
        nan += int(piece.isnan().sum())
        inf += int(piece.isinf().sum())
        if good.numel():
            low, high = min(low, float(good.min())), max(high, float(good.max()))
            total += float(good.sum())
            squares += float(good.square().sum())
            zeros += int((good == 0).sum())
            count += good.numel()
    if not count:
        return Statistics(math.nan, math.nan, math.nan, math.nan, math.nan, zeros, nan, inf)
    mean = total / count
    return Statistics(low, high, mean, math.sqrt(max(squares / count - mean * mean, 0.0)), math.sqrt(squares), zeros, nan, inf)
