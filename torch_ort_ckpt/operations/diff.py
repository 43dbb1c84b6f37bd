"""What differs between two states, and by how much."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ..checkpoint.backing import release_pages
from ..checkpoint.notebook import html_table
from ..checkpoint.state import CheckpointState, Value, is_string, nbytes, same_number, same_tensor
from ..dtypes import short_name
from ..errors import CheckpointError, printable
from ..formats import load
from ..storage.files import Progress
from ..storage.paths import PathLike

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Difference:
    """One thing that differs. For tensors of equal shape: how many elements, and the largest and mean absolute change."""

    name: str
    what: str
    changed: int | None = None
    total: int | None = None
    max_abs: float | None = None
    mean_abs: float | None = None
    relative: float | None = None

    def __str__(self) -> str:
        if self.changed is None:
            return f"{printable(self.name)}: {printable(self.what)}"
        return (
            f"{printable(self.name)}: {self.changed} of {self.total} elements, max |a-b| {self.max_abs:.3g}, relative {self.relative:.3g}"
        )


@dataclass
class DiffReport:
    """The result of `diff`: `equal` when nothing differs beyond the tolerance. Iterates over the differences."""

    compared: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether nothing differs beyond the tolerance."""
        return not self.differences

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.differences)

    def __len__(self) -> int:
        return len(self.differences)

    def __bool__(self) -> NoReturn:
        raise TypeError("the truth value of a DiffReport is ambiguous: use .equal, or len(report) for the number of differences")

    def __str__(self) -> str:
        head = f"{self.compared} compared, {len(self.differences)} differ"
        return "\n".join([head, *map(str, self.differences)])

    def _repr_html_(self) -> str:
        rows = [
            (item.name, item.what, "", "", "")
            if item.changed is None
            else (item.name, item.what, f"{item.changed} of {item.total}", f"{item.max_abs:.3g}", f"{item.relative:.3g}")
            for item in self.differences
        ]
        caption = f"{self.compared} compared, {len(rows)} differ"
        return html_table(caption, ("name", "what", "elements", "max |a-b|", "relative"), rows)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, as `diff --json` prints it."""
        return {"equal": self.equal, "compared": self.compared, "differences": [dataclasses.asdict(item) for item in self.differences]}


def diff(
    a: CheckpointState | PathLike, b: CheckpointState | PathLike, *, atol: float = 0.0, rtol: float = 0.0, progress: Progress | None = None
) -> DiffReport:
    """Compare tensors, steps, rates and properties. With the default tolerances equal means equal bits (NaN included)."""
    left = a if isinstance(a, CheckpointState) else load(a)
    right = b if isinstance(b, CheckpointState) else load(b)
    loaded = [state for source, state in ((a, left), (b, right)) if source is not state]
    return compare(left, right, atol=atol, rtol=rtol, progress=progress, release=loaded)


def compare(
    left: CheckpointState,
    right: CheckpointState,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    progress: Progress | None = None,
    release: Sequence[CheckpointState] = (),
) -> DiffReport:
    """`diff` of two states. The pages of those in `release` are given back after each tensor."""
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not value >= 0:
            raise CheckpointError(f"{name} must not be negative", remedy="Use 0 for bit for bit.")
    report = DiffReport()
    tensors_a, tensors_b = dict(left.tensors()), dict(right.tensors())
    for name in sorted(tensors_a.keys() | tensors_b.keys()):
        report.compared += 1
        if name not in tensors_b or name not in tensors_a:
            report.differences.append(Difference(name, "only in a" if name in tensors_a else "only in b"))
        elif found := compare_tensors(name, tensors_a[name], tensors_b[name], atol, rtol):
            report.differences.append(found)
        release_pages(*release)
        if progress:
            progress(sum(nbytes(side[name]) for side in (tensors_a, tensors_b) if name in side))
    _compare_values(report, "", {"nominal": left.nominal}, {"nominal": right.nominal})
    _compare_values(report, "properties/", left.properties, right.properties)
    _compare_values(report, "partitions/", left.partitions, right.partitions)
    _compare_values(report, "", _group_values(left), _group_values(right))
    return report


def compare_tensors(name: str, a: Value, b: Value, atol: float = 0.0, rtol: float = 0.0) -> Difference | None:
    """None when equal within the tolerance."""
    if is_string(a) or is_string(b):
        return None if same_tensor(a, b) else Difference(name, "strings differ")
    if a.dtype != b.dtype:
        return Difference(name, f"{short_name(a.dtype)} / {short_name(b.dtype)}")
    if a.is_meta != b.is_meta:  # nominal: its shape is not known either
        return Difference(name, "one has no data")
    if a.shape != b.shape:
        return Difference(name, f"shape {tuple(a.shape)} / {tuple(b.shape)}")
    if same_tensor(a, b):
        return None
    changed, largest, total, scale, beyond = 0, 0.0, 0.0, 0.0, False
    flat_a, flat_b = a.detach().reshape(-1), b.detach().reshape(-1)
    for start in range(0, a.numel(), _CHUNK):
        x, y = (flat[start : start + _CHUNK].cpu().to(torch.float64) for flat in (flat_a, flat_b))
        gap = (x - y).abs()
        gap[(x.isnan() & y.isnan()) | (x == y)] = 0
        gap[gap.isnan()] = math.inf
        different = (gap > 0) | (torch.signbit(x) != torch.signbit(y)) & (atol == 0)
        changed += int(different.sum())
        largest, total = max(largest, float(gap.max())), total + float(gap.sum())
        scale = max(scale, float(y.abs().nan_to_num(0, 0, 0).max()))
        beyond = beyond or bool((gap > atol + rtol * y.abs().nan_to_num(0)).any())
    if not beyond and (atol or rtol):
        return None
    count = a.numel()
    return Difference(name, "values", changed or count, count, largest, total / count, largest / scale if scale else math.inf)


def _group_values(state: CheckpointState) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, group in state.optimizer.items():
        values[f"optimizer/{name}.step"] = group.step
        values[f"optimizer/{name}.initial_lr"] = float(group.initial_lr)
        values[f"optimizer/{name}.lr"] = group.lr
        values[f"optimizer/{name}.hyperparameters"] = group.hyperparameters
    return values


def _compare_values(report: DiffReport, prefix: str, a: dict[str, Any], b: dict[str, Any]) -> None:
    for name in sorted(a.keys() | b.keys()):
        report.compared += 1
        if name not in a or name not in b:
            report.differences.append(Difference(prefix + name, "only in a" if name in a else "only in b"))
        elif not same_number(a[name], b[name]):
            report.differences.append(Difference(prefix + name, f"{a[name]!r} / {b[name]!r}"))
