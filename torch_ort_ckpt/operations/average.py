"""Federated averaging: many checkpoints in, one out, in the memory of one model however many there are.

Files are read piece by piece and none is kept open, so that thousands need no more than one does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..catalog import AVERAGES
from ..checkpoint.state import CheckpointState, OptimizerGroup, Value, is_string, same_number, same_tensor
from ..errors import CheckpointError, UnsupportedError
from ..formats import load
from ..formats.legacy.moments import own_step
from ..storage.files import Progress, warn
from ..storage.paths import PathLike, as_path
from .pieces import Pieces

_CHUNK = 1 << 22  # elements: 32 MiB of float64
_LEAST = 1 << 12  # elements read at a time of one file, however many files there are
_LISTED = 50


def average(
    states_or_paths: Sequence[CheckpointState | PathLike],
    weights: Sequence[float] | None = None,
    *,
    how: str = "mean",
    trim: float = 0.1,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> CheckpointState:
    """The weighted mean of parameters and moments; weights need not sum to one.

    `how="median"` and `how="trimmed"` withstand a few inputs with wrong values: the median of each element, or the mean without the share
    `trim` of the inputs at either end. Both take no weights.

    Sums run in float64 and are rounded once. Integers are rounded to the nearest; booleans and strings must agree. Properties are kept
    where all inputs agree. The step is the furthest of all. A checkpoint with NaN or infinite values is refused; with `skip_bad` it is
    left out with a warning, and only the weights of the others count.
    """
    if isinstance(states_or_paths, CheckpointState):  # type: ignore[unreachable]  # iterating over it would give names of parameters
        raise CheckpointError("expected a list of checkpoints, not a single state", remedy="Pass [a, b, ...].")
    _check_how(how, trim, weights)
    sources = list(states_or_paths)
    if not sources:
        raise CheckpointError("nothing to average", remedy="Give at least one checkpoint.")
    given = _checked_weights(weights, len(sources))
    labels = [os.fspath(as_path(source)) if not isinstance(source, CheckpointState) else f"state {n}" for n, source in enumerate(sources)]
    pieces = Pieces()
    states = [source if isinstance(source, CheckpointState) else pieces.without_files(load(source)) for source in sources]
    for label, state in zip(labels, states, strict=True):
        _check_same_tensors(states[0], state, label)

    def mean_of(chosen: list[int]) -> tuple[CheckpointState, dict[int, str]]:
        shares = _normalised([given[n] for n in chosen])
        work = _Averager(shares, [labels[n] for n in chosen], pieces, how, trim, progress, skip_bad)
        result = work.state([states[n] for n in chosen])
        if work.disagreement and not work.bad:
            raise work.disagreement
        return result, work.bad

    result, bad = mean_of([*range(len(states))])
    if bad:  # all of them are known after one pass; the mean of the others takes a second
        del result
        if len(bad) == len(states):
            raise CheckpointError(f"all {len(states)} checkpoints have NaN or infinite values", path=labels[0], field=bad[0])
        listed = "; ".join(f"{labels[n]} ({field})" for n, field in sorted(bad.items())[:_LISTED])
        more = " ..." if len(bad) > _LISTED else ""
        warn(f"{len(bad)} of {len(states)} checkpoints have NaN or infinite values and are left out: {listed}{more}")
        result, _ = mean_of([n for n in range(len(states)) if n not in bad])
    return _with_numbers(result, [state for n, state in enumerate(states) if n not in bad])


class _Averager:
    """The mean of each tensor. `bad` tells which inputs have NaN or infinite values, and where first; without `skip` that is an error."""

    def __init__(
        self, shares: list[float], labels: list[str], pieces: Pieces, how: str, trim: float, progress: Progress | None, skip: bool
    ) -> None:
        self.shares, self.labels, self.pieces, self.progress, self.skip = shares, labels, pieces, progress, skip
        self.how, self.cut = how, _cut(how, trim, len(labels))
        self.bad: dict[int, str] = {}
        self._results: dict[str, torch.Tensor] = {}
        self.disagreement: CheckpointError | None = None

    def state(self, states: list[CheckpointState]) -> CheckpointState:
        """Tensors only; what else there is, `_with_numbers` adds."""
        first = states[0]
        # All results before any piece: made in turn with the pieces, they would leave holes in memory as large as themselves.
        self._results = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in first.tensors() if not is_string(value)}
        result = CheckpointState(
            trainable=self.tensors([state.trainable for state in states], "trainable"),
            frozen=self.tensors([state.frozen for state in states], "frozen"),
        )
        for name, group in first.optimizer.items():
            result.optimizer[name] = OptimizerGroup(
                states={
                    param: self.tensors([_moments(state.optimizer[name].states[param]) for state in states], f"optimizer/{name}/{param}")
                    for param in group.states
                }
            )
        masters = result.parameters
        alone = [{name: value for name, value in state.mixed_precision.items() if name not in masters} for state in states]
        result.mixed_precision = self.tensors(alone, "mixed_precision")
        for name, alias in first.mixed_precision.items():
            if name in masters:
                result.mixed_precision[name] = masters[name].to(alias.dtype)
        return result

    def tensors(self, many: Sequence[Mapping[str, Value]], where: str) -> dict[str, Value]:
        return {name: self.one(f"{where}/{name}", [values[name] for values in many]) for name in many[0]}

    def one(self, name: str, values: list[Value]) -> Value:
        first = values[0]
        if is_string(first):
            for label, value in zip(self.labels, values, strict=True):
                if not same_tensor(first, value):
                    self._disagree(label, name)
            return first.copy()
        result = self._results.pop(name)
        flat, step = result.reshape(-1), _CHUNK if self.how == "mean" else max(_LEAST, _CHUNK // len(values))
        for start in range(0, flat.numel(), step):
            stop = min(start + step, flat.numel())
            flat[start:stop] = self._piece(name, values, start, stop)
            if self.progress:
                self.progress((stop - start) * first.element_size() * len(values))
        return result

    def _piece(self, name: str, values: list[Value], start: int, stop: int) -> torch.Tensor:
        if values[0].dtype == torch.bool:
            return self._agreed(name, values, start, stop)
        if self.how == "mean":
            return self._mean(name, values, start, stop)
        return self._middle(name, values, start, stop)

    def _agreed(self, name: str, values: list[Value], start: int, stop: int) -> torch.Tensor:
        first = self.pieces.read(values[0], start, stop)
        for label, value in zip(self.labels, values, strict=True):
            if not same_tensor(first, self.pieces.read(value, start, stop)):
                self._disagree(label, name)
        return first

    def _mean(self, name: str, values: list[Value], start: int, stop: int) -> torch.Tensor:
        dtype = values[0].dtype
        wide, exact = _wide(dtype)
        first = self.pieces.read(values[0], start, stop)
        total, same = torch.zeros(first.shape, dtype=wide), True
        for share, value in zip(self.shares, values, strict=True):
            piece = self.pieces.read(value, start, stop) if value is not values[0] else first
            same = same and same_tensor(first, piece)
            total.add_(piece.to(wide), alpha=share)
        # Checking the sum checks every piece: NaN and infinities propagate.
        if not exact and not (_adds_up(total) and (not same or _adds_up(first.to(wide)))):
            self._look_for_bad(name, values, start, stop)
        if same:
            return first  # exact, also for integers beyond 2^53
        return (total.round() if exact else total).to(dtype)

    def _middle(self, name: str, values: list[Value], start: int, stop: int) -> torch.Tensor:
        """The median, or the mean without the ends; both are the mean of a part of the sorted values."""
        dtype = values[0].dtype
        wide, exact = _wide(dtype)
        if wide.is_complex:
            raise UnsupportedError(f"complex numbers have no {self.how}", field=name, remedy='Use how="mean".')
        rows = torch.stack([self.pieces.read(value, start, stop) for value in values])
        if not exact and not _adds_up(rows if dtype.itemsize > 4 else rows.to(wide)):
            self._look_for_bad(name, values, start, stop)
        low, high = self.cut, len(values) - self.cut - 1
        table = (rows if exact or dtype.itemsize > 2 else rows.to(wide)).numpy()
        if self.cut:  # a partition takes a fraction of the time of a sort, and more so along the last axis
            table = np.partition(np.ascontiguousarray(table.T), (low, high), axis=1).T[low : high + 1]
        kept = torch.from_numpy(np.ascontiguousarray(table))
        if len(kept) == 1:
            return kept[0].to(dtype)
        middle = kept.to(wide).mean(dim=0)
        return (middle.round() if exact else middle).to(dtype)

    def _look_for_bad(self, name: str, values: list[Value], start: int, stop: int) -> None:
        for number, value in enumerate(values):
            if number in self.bad or bool(self.pieces.read(value, start, stop).to(_wide(value.dtype)[0]).isfinite().all()):
                continue
            if not self.skip:
                raise CheckpointError(
                    "has NaN or infinite values, which would be in the mean too",
                    path=self.labels[number],
                    field=name,
                    remedy="Leave the checkpoint out, or pass skip_bad=True (--skip-bad) to leave out all such.",
                )
            self.bad[number] = name

    def _disagree(self, label: str, name: str) -> None:
        """An error at once, or when it is known that no input is left out for being bad."""
        error = CheckpointError(
            "differs between the inputs and can't be averaged",
            path=label,
            field=name,
            remedy="Leave the checkpoint out; `torch-ort-ckpt diff` shows the difference.",
        )
        if not self.skip:
            raise error
        self.disagreement = self.disagreement or error


def _check_how(how: str, trim: float, weights: Sequence[float] | None) -> None:
    if how not in AVERAGES:
        raise CheckpointError(f"{how!r} is not one of {', '.join(AVERAGES)}", field="how")
    if how != "mean" and weights is not None:
        raise CheckpointError(f"the {how} average takes no weights", field="weights", remedy='Use how="mean", or leave them out.')
    if not 0 <= trim < 0.5:
        raise CheckpointError(f"must be at least 0 and less than 0.5, not {trim}", field="trim", remedy="It is cut off at both ends.")


def _cut(how: str, trim: float, count: int) -> int:
    """How many of the sorted values to leave out at each end."""
    return {"mean": 0, "median": (count - 1) // 2, "trimmed": int(trim * count + 1e-9)}[how]


def _wide(dtype: torch.dtype) -> tuple[torch.dtype, bool]:
    """The type to compute in, and whether the values are integers."""
    return (torch.complex128 if dtype.is_complex else torch.float64), not dtype.is_floating_point and not dtype.is_complex


def _adds_up(values: torch.Tensor) -> bool:
    """False if a value is NaN or infinite (or if finite ones are so large that a closer check is needed)."""
    return bool(values.sum().isfinite())


def _moments(states: Mapping[str, Value]) -> dict[str, Value]:
    return {key: value for key, value in states.items() if key != "step"}


def _with_numbers(result: CheckpointState, states: list[CheckpointState]) -> CheckpointState:
    """The means with the steps, rates, properties and partitions of the inputs."""
    result.partitions = dict(states[0].partitions)
    result.properties = _common_properties(states)
    for name, group in result.optimizer.items():
        _set_numbers(group, [state.optimizer[name] for state in states], name)
    return result


def _set_numbers(result: OptimizerGroup, groups: list[OptimizerGroup], name: str) -> None:
    first = groups[0]
    result.step = max(group.step for group in groups)
    if any(group.step != result.step for group in groups):
        least = min(group.step for group in groups)
        warn(f"{name}: the inputs are at different steps ({least} to {result.step}); the result takes {result.step}")
    for param, states in result.states.items():
        step = max(own_step(group, param) for group in groups)
        if step != result.step:
            states["step"] = torch.tensor(step)
    result.initial_lr = first.initial_lr
    same_rate = all(same_number(group.lr, first.lr) for group in groups)
    result.lr = first.lr if same_rate else None
    keys = sorted({key for group in groups for key in group.hyperparameters})
    differing = [key for key in keys if any(group.hyperparameters.get(key) != first.hyperparameters.get(key) for group in groups)]
    result.hyperparameters = {key: value for key, value in first.hyperparameters.items() if key not in differing}
    if lost := [*([] if same_rate else ["lr"]), *differing]:
        warn(f"{name}: {', '.join(lost)} differ between the inputs and are left out")
    if any(not same_number(group.initial_lr, first.initial_lr) for group in groups):
        warn(f"{name}: the inputs have different initial rates; the result takes the first one's, {first.initial_lr:g}")


def _check_same_tensors(first: CheckpointState, state: CheckpointState, label: str) -> None:
    if state.nominal:
        raise CheckpointError("a nominal checkpoint has no values to average", path=label, remedy="Leave it out, or give it weights first.")
    wanted, found = _content(first), _content(state)
    if odd := sorted(wanted.keys() ^ found.keys()):
        raise CheckpointError(
            f"{'has' if odd[0] in found else 'lacks'} this, unlike the first input",
            path=label,
            field=odd[0],
            remedy="Average checkpoints of one model, all with or all without optimizer state.",
        )
    for key, value in wanted.items():
        other = found[key]
        if value is None or other is None:
            continue
        if is_string(value) != is_string(other) or value.shape != other.shape or value.dtype != other.dtype:
            raise CheckpointError(
                f"{tuple(other.shape)} {other.dtype}, the first input has {tuple(value.shape)} {value.dtype}",
                path=label,
                field=key,
                remedy="Average checkpoints of one model only; `torch-ort-ckpt diff` shows where they differ.",
            )


def _content(state: CheckpointState) -> dict[str, Value]:
    """Every tensor by its label, without the weights' own steps; groups and their members, which may have no tensors, as None."""
    found: dict[str, Value] = {}
    for kind in ("trainable", "frozen", "mixed_precision"):
        found |= {f"{kind}/{name}": value for name, value in getattr(state, kind).items()}
    for name, group in state.optimizer.items():
        found[f"optimizer/{name}"] = None
        for param, states in group.states.items():
            found[f"optimizer/{name}/{param}"] = None
            found |= {f"optimizer/{name}/{param}/{moment}": value for moment, value in _moments(states).items()}
    return found


def _common_properties(states: list[CheckpointState]) -> dict[str, int | float | str]:
    names = set().union(*(state.properties for state in states))
    common = {
        name: states[0].properties[name]
        for name in states[0].properties
        if all(name in state.properties and same_number(state.properties[name], states[0].properties[name]) for state in states)
    }
    if lost := sorted(names - common.keys()):
        warn(f"properties that differ between the inputs are left out: {', '.join(lost[:5])}{' ...' if len(lost) > 5 else ''}")
    return common


def _checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    given = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(given) != count:
        raise CheckpointError(
            f"{len(given)} weights for {count} checkpoints", remedy="Give one weight for each checkpoint, in their order."
        )
    return given


def _normalised(given: list[float]) -> list[float]:
    if not all(math.isfinite(weight) and weight >= 0 for weight in given) or not math.fsum(given) > 0:
        raise CheckpointError(
            "weights must be finite, not negative, and not all zero", remedy="Use for example the number of samples behind each checkpoint."
        )
    total = math.fsum(given)
    return [weight / total for weight in given]
