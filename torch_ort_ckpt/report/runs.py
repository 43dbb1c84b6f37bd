"""The page about a run: loss, metrics, learning rate, size of weights and moments over all its checkpoints; several runs side by side."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.backing import release_pages
from ..checkpoint.state import CheckpointState, Value, format_bytes, is_string
from ..errors import CheckpointError, MissingFileError
from ..formats import detect, load
from ..operations.summarize import measure
from ..storage.paths import PathLike, as_path
from ..training.directory import list_entries


@dataclass
class Point:
    """One checkpoint of a run."""

    run: str
    step: int
    path: Path
    metrics: dict[str, float] = field(default_factory=dict)
    rate: float | None = None
    weights: float | None = None
    """The norm of all trainable weights together."""
    moments: dict[str, float] = field(default_factory=dict)
    """Moment -> its root mean square over all parameters."""
    nbytes: int = 0
    ranks: int = 1
    created: float = 0.0
    problem: str | None = None


def points(paths: Sequence[PathLike], *, statistics: bool = True, progress: Callable[[int], None] | None = None) -> list[Point]:
    """The checkpoints of checkpoint directories, each a run, and of single files (rounds of a federated server), together a run."""
    found: list[Point] = []
    for path in paths:
        place = as_path(path)
        entries = list_entries(place) if place.is_dir() else []
        if not place.exists():
            raise MissingFileError("no such file or folder", path=path, remedy="Give a folder that a CheckpointManager saves to.")
        for entry in entries:
            point = Point(place.name, entry.step, entry.checkpoint, dict(entry.metrics), nbytes=entry.nbytes, created=entry.created)
            point.ranks, point.problem = entry.ranks, entry.problem
            found.append(point)
        if not entries and (not place.is_dir() or _is_checkpoint(place)):
            found.append(Point("", -1, place, nbytes=place.stat().st_size))
    for number, point in enumerate(found):
        if point.problem is None and (statistics or point.step < 0):
            _measure(point, number, statistics)
        if progress:
            progress(point.nbytes)
    return found


def _is_checkpoint(place: Path) -> bool:
    try:
        detect(place)
    except CheckpointError:
        return False
    return True


def _measure(point: Point, number: int, statistics: bool) -> None:
    try:
        state = load(point.path)
    except CheckpointError as error:
        point.problem = str(error)
        return
    if point.step < 0:
        point.step = state.step or number
        point.metrics = {
            name: float(value) for name, value in state.properties.items() if isinstance(value, float) and math.isfinite(value)
        }
    group = next(iter(state.optimizer.values()), None)
    point.rate = None if group is None else group.lr if group.lr is not None else group.initial_lr
    if not statistics or state.nominal:
        return
    point.weights = math.sqrt(sum(square for square, _ in _squares(state.trainable.values(), state)))
    for moment in ("momentum0", "momentum1"):
        values = [states[moment] for one in state.optimizer.values() for states in one.states.values() if moment in states]
        sums = list(_squares(values, state))
        if count := sum(size for _, size in sums):
            point.moments[moment] = math.sqrt(sum(square for square, _ in sums) / count)


def _squares(values: Iterable[Value], state: CheckpointState) -> Iterable[tuple[float, int]]:
    """(sum of squares, elements) of each tensor; the pages behind them are given back."""
    for value in values:
        if not is_string(value) and isinstance(value, torch.Tensor) and (found := measure(value)) is not None:
            yield found.norm**2, value.numel()
        release_pages(state)


def run_page(paths: Sequence[PathLike], *, statistics: bool = True, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Describe the page."""
    found = points(paths, statistics=statistics, progress=progress)
    metrics = sorted({name for point in found for name in point.metrics})
    moments = sorted({name for point in found for name in point.moments})
    titles = [os.path.basename(os.path.abspath(path)) for path in paths]
    whole = [point for point in found if point.problem is None]
    charts = [_lines(name, found, [point.metrics.get(name) for point in found]) for name in metrics]
    charts.append(_lines("learning rate", found, [point.rate for point in found]))
    charts.append(_lines("norm of all weights", found, [point.weights for point in found]))
    charts += [_lines(f"{name}, RMS", found, [point.moments.get(name) for point in found]) for name in moments]
    return {
        "title": " / ".join(titles[:4]) + (f" and {len(titles) - 4} more" if len(titles) > 4 else ""),
        "subtitle": ", ".join(str(path) for path in paths),
        "facts": [
            ("Checkpoints", f"{len(found)}" + (f", {len(found) - len(whole)} damaged" if len(whole) < len(found) else "")),
            ("Steps", f"{min(p.step for p in found)} to {max(p.step for p in found)}" if found else "none"),
            ("Size", format_bytes(sum(point.nbytes for point in found))),
            *((f"Last {name}", f"{last:.5g}") for name in metrics if (last := _last(whole, name)) is not None),
        ],
        "columns": _columns(metrics, moments),
        "rows": [_row(point) for point in found],
        "charts": [chart for chart in charts if chart["series"]],
        "tables": [],
        "noun": "Checkpoints",
        "charts_first": True,
    }


def _last(found: list[Point], name: str) -> float | None:
    return next((point.metrics[name] for point in reversed(found) if name in point.metrics), None)


def _lines(title: str, found: list[Point], heights: list[float | None]) -> dict[str, Any]:
    """A chart with a line for each run: the value over the step."""
    series: dict[str, list[list[float]]] = {}
    for point, height in zip(found, heights, strict=True):
        if height is not None and math.isfinite(height):
            series.setdefault(point.run, []).append([point.step, height])
    return {
        "type": "lines",
        "title": title,
        "series": [{"name": name or "checkpoints", "points": sorted(line)} for name, line in series.items()],
    }


def _columns(metrics: list[str], moments: list[str]) -> list[dict[str, str]]:
    columns = [("name", "checkpoint", "text"), ("kind", "run", "text"), ("step", "step", "count"), ("problems", "problem", "problem")]
    columns += [(f"metric {name}", name, "number") for name in metrics]
    columns += [("rate", "learning rate", "number"), ("weights", "norm of weights", "number")]
    columns += [(f"moment {name}", f"{name} RMS", "number") for name in moments]
    columns += [("bytes", "size", "bytes"), ("created", "saved", "text")]
    return [{"key": key, "label": label, "type": kind} for key, label, kind in columns]


def _row(point: Point) -> dict[str, Any]:
    saved = datetime.datetime.fromtimestamp(point.created).isoformat(" ", "seconds") if point.created else ""
    name = point.path.parent.name if point.path.name == "checkpoint" else point.path.name
    row: dict[str, Any] = {"name": name, "kind": point.run, "step": point.step, "problems": point.problem or ""}
    row |= {f"metric {key}": value for key, value in point.metrics.items()} | {"rate": point.rate, "weights": point.weights}
    row |= {f"moment {key}": value for key, value in point.moments.items()} | {"bytes": point.nbytes, "created": saved}
    return row
