"""The page about two checkpoints: a row for each tensor, with how far it moved."""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from ..checkpoint.backing import release_pages
from ..checkpoint.state import is_string, nbytes
from ..formats import load
from ..operations.diff import Difference, DiffReport, compare
from ..storage.paths import PathLike
from .histogram import CHUNK, histogram_of_difference

_EQUAL = Difference("", "equal", 0, None, 0.0, 0.0, 0.0)


def comparison(a: PathLike, b: PathLike, *, atol: float = 0.0, rtol: float = 0.0) -> tuple[dict[str, Any], DiffReport]:
    """Describe the page; also the report that it is made from."""
    left, right = load(a), load(b)
    report = compare(left, right, atol=atol, rtol=rtol, release=(left, right))
    found = {item.name: item for item in report}
    tensors_a, tensors_b = dict(left.tensors()), dict(right.tensors())
    rows = []
    for label in list(dict.fromkeys([*tensors_a, *tensors_b])):
        rows.append(_row(label, tensors_a.get(label), tensors_b.get(label), found.pop(label, _EQUAL)))
        release_pages(left, right)
    changed = [row for row in rows if row["what"] != "equal"]
    facts = [
        ("Result", "equal" if report.equal else "different"),
        ("Compared", f"{len(report)} of {report.compared} differ"),
        ("Tensors", f"{len(changed)} of {len(rows)} differ"),
        ("Step", f"{left.step} / {right.step}"),
        ("Largest change", _largest(changed)),
        ("Tolerance", f"absolute {atol:g}, relative {rtol:g}" if atol or rtol else "none: bit for bit"),
    ]
    content = {
        "title": f"{_short(a)} / {_short(b)}",
        "subtitle": f"a is {a}, b is {b}",
        "facts": facts,
        "columns": [{"key": key, "label": label, "type": kind} for key, label, kind in _COLUMNS],
        "rows": rows,
        "charts": [
            {"type": "bars", "title": "Change of each tensor, |b-a| / |a|", "value": "change"},
            {"type": "scatter", "title": "Change against size", "x": "norm", "xlabel": "|a|", "ys": ["moved"], "ylabel": "|b-a|"},
            {"type": "treemap", "title": "Where the bytes are", "size": "bytes", "colour": "what"},
        ],
        "tables": [_others(found)] if found else [],
        "sort": "change",
        "tree": {"size": "bytes", "measure": "moved", "against": "norm", "label": "|b-a| / |a|"},
    }
    return content, report


_COLUMNS = [
    ("name", "name", "text"),
    ("kind", "kind", "text"),
    ("what", "difference", "text"),
    ("shape", "shape", "shape"),
    ("bytes", "size", "bytes"),
    ("problems", "NaN / Inf", "problem"),
    ("histogram", "histogram of b-a", "histogram"),
    ("changed", "elements changed", "percent"),
    ("max_abs", "max |b-a|", "number"),
    ("mean_abs", "mean |b-a|", "number"),
    ("change", "|b-a| / |a|", "number"),
    ("norm", "|a|", "number"),
]


def _row(label: str, a: Any, b: Any, found: Difference) -> dict[str, Any]:
    kind, _, name = label.partition("/")
    value = b if a is None else a
    what = {"values": "changed"}.get(found.what, found.what)
    row: dict[str, Any] = {"name": name, "kind": kind, "what": what, "problems": "", "bytes": nbytes(value), "shape": list(value.shape)}
    if found.changed is None or a is None or b is None or is_string(a) or a.is_meta or a.numel() == 0:
        return row
    row |= {"changed": found.changed / a.numel(), "max_abs": found.max_abs, "mean_abs": found.mean_abs}
    norm, moved, lost = _distances(a, b)
    row |= {"norm": norm, "moved": moved, "change": moved / norm if norm else (0.0 if moved == 0 else None), "problems": lost}
    if found is not _EQUAL and a.dtype.is_floating_point:
        row["histogram"] = histogram_of_difference(a, b)
    return row


def _distances(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, str]:
    """|a|, |b-a| over the finite elements, and which of the two has others."""
    norm = moved = 0.0
    bad = {"a": 0, "b": 0}
    flat_a, flat_b = a.detach().reshape(-1), b.detach().reshape(-1)
    for start in range(0, a.numel(), CHUNK):
        x, y = (flat[start : start + CHUNK].cpu().to(torch.float64) for flat in (flat_a, flat_b))
        for name, piece in (("a", x), ("b", y)):
            bad[name] += int((~piece.isfinite()).sum())
        good = x.isfinite() & y.isfinite()
        norm += float(x[good].square().sum())
        moved += float((y - x)[good].square().sum())
    return math.sqrt(norm), math.sqrt(moved), ", ".join(f"{count} in {name}" for name, count in bad.items() if count)


def _largest(rows: list[dict[str, Any]]) -> str:
    known = [row for row in rows if row.get("change") is not None]
    if not known:
        return "none" if not rows else "not a number"
    top = max(known, key=lambda row: float(row["change"]))
    return f"{top['change']:.3g} of |a| in {top['name']}"


def _others(found: dict[str, Difference]) -> dict[str, Any]:
    rows = [[item.name, item.what[:500]] for item in found.values()]
    return {"title": "Other differences (a / b)", "columns": ["what", "difference"], "rows": rows}


def _short(path: PathLike) -> str:
    return os.path.basename(os.path.abspath(path))
