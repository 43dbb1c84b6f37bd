"""The page about one checkpoint: a row for each parameter, with its moments next to it."""

from __future__ import annotations

import math
import os
from typing import Any

from ..checkpoint.backing import release_pages
from ..checkpoint.state import CheckpointState, Value, format_bytes, is_string, nbytes
from ..dtypes import short_name
from ..formats import detect, load, read_by
from ..operations.summarize import Statistics, measure
from ..storage.files import Progress
from ..storage.paths import PathLike
from .histogram import histogram
from .training import odd_units, update_ratios


def inspection(path: PathLike, *, format: str | None = None, statistics: bool = True, progress: Progress | None = None) -> dict[str, Any]:
    """Describe the page. Without `statistics` the tensors' data is not read."""
    name = format or detect(path)
    state = load(path, format=name)
    moments = _moments(state)
    ratios = update_ratios(state) if statistics else {}
    release_pages(state)
    rows = []
    for kind, values in (("trainable", state.trainable), ("frozen", state.frozen), ("alias", state.mixed_precision)):
        for param, value in values.items():
            own = moments.get(param, {}) if kind != "alias" else {}
            rows.append(_row(param, kind, value, own, statistics))
            if statistics:
                rows[-1] |= {"units": odd_units(value)} | ({"update": ratios[param]} if own and param in ratios else {})
            release_pages(state)
            if progress:
                progress(nbytes(value) + sum(map(nbytes, own.values())))
    names = sorted({moment for own in moments.values() for moment in own})
    bad = sum(1 for row in rows if row["problems"])
    version = f" version {state.format_version}" if state.format_version else ""
    facts = [
        ("Format", f"{name}{version}"),
        ("Read by", read_by(name, path)),
        ("Parameters", f"{sum(row['elements'] for row in rows if row['kind'] != 'alias'):,} in {len(state.parameters)} tensors"),
        ("Size", format_bytes(sum(row["bytes"] for row in rows))),
        ("Step", str(state.step)),
        ("NaN or infinity", (f"in {bad} tensors" if bad else "none") if statistics else "not checked"),
    ]
    return {
        "title": os.path.basename(os.path.abspath(path)),
        "subtitle": str(path),
        "facts": facts,
        "columns": _columns(names, statistics, any(row.get("units") for row in rows), any("update" in row for row in rows)),
        "rows": rows,
        "charts": _charts(names, statistics),
        "tree": {"size": "bytes", "measure": "norm", "label": "norm"},
        "tables": [table for table in (_groups(state), _properties(state)) if table["rows"]],
    }


def _moments(state: CheckpointState) -> dict[str, dict[str, Value]]:
    found: dict[str, dict[str, Value]] = {}
    for group in state.optimizer.values():
        for param, states in group.states.items():
            found.setdefault(param, {}).update({moment: value for moment, value in states.items() if moment != "step"})
    return found


def _row(name: str, kind: str, value: Value, moments: dict[str, Value], statistics: bool) -> dict[str, Any]:
    elements = math.prod(value.shape)
    row: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "dtype": "string" if is_string(value) else short_name(value.dtype),
        "shape": list(value.shape),
        "elements": elements,
        "bytes": nbytes(value) + sum(map(nbytes, moments.values())),
        "problems": "",
    }
    if not statistics:
        return row
    problems = []
    if found := measure(value):
        row |= {"min": found.minimum, "max": found.maximum, "mean": found.mean, "std": found.std, "norm": found.norm}
        row |= {"rms": found.norm / math.sqrt(elements), "zeros": found.zeros / elements, "nan": found.nan, "inf": found.inf}
        row["histogram"] = histogram(value, found.minimum, found.maximum)
        problems += _problems(found, "")
    for moment, tensor in moments.items():
        if found := measure(tensor):
            row[moment] = found.norm / math.sqrt(tensor.numel())
            problems += _problems(found, f"{moment}: ")
    row["problems"] = ", ".join(problems)
    return row


def _problems(found: Statistics, where: str) -> list[str]:
    return [f"{where}{count} {what}" for count, what in ((found.nan, "NaN"), (found.inf, "Inf")) if count]


def _columns(moments: list[str], statistics: bool, units: bool, updates: bool) -> list[dict[str, str]]:
    columns = [("name", "name", "text"), ("kind", "kind", "text"), ("dtype", "dtype", "text"), ("shape", "shape", "shape")]
    columns.append(("bytes", "size with moments", "bytes"))
    if statistics:
        columns += [("problems", "NaN / Inf", "problem"), ("histogram", "histogram", "histogram")]
        columns += [("units", "units", "problem")] if units else []
        columns += [("update", "last update / weight", "number")] if updates else []
        columns += [(key, key, "number") for key in ("min", "max", "mean", "std", "norm")]
        columns.append(("zeros", "zeros", "percent"))
        columns += [(moment, f"{moment} RMS", "number") for moment in moments]
    return [{"key": key, "label": label, "type": kind} for key, label, kind in columns]


def _charts(moments: list[str], statistics: bool) -> list[dict[str, Any]]:
    charts: list[dict[str, Any]] = [{"type": "treemap", "title": "Where the bytes are", "size": "bytes", "colour": "kind"}]
    if statistics:
        charts.append({"type": "bars", "title": "Norm of each tensor", "value": "norm"})
        if moments:
            axes = {"x": "rms", "xlabel": "RMS of the weight", "ys": moments, "ylabel": "RMS of its moment"}
            charts.append({"type": "scatter", "title": "Moments against weights", **axes})
    return charts


def _groups(state: CheckpointState) -> dict[str, Any]:
    rows = [
        [name, group.step, f"{group.initial_lr:g}", "" if group.lr is None else f"{group.lr:g}", len(group.states)]
        for name, group in state.optimizer.items()
    ]
    return {"title": "Optimizer groups", "columns": ["group", "step", "initial lr", "lr", "parameters"], "rows": rows}


def _properties(state: CheckpointState) -> dict[str, Any]:
    rows = [[name, type(value).__name__, str(value)[:500]] for name, value in sorted(state.properties.items())]
    return {"title": "Properties", "columns": ["name", "type", "value"], "rows": rows}
