"""Federated averaging: many checkpoints in, one out, in the memory of one model however many there are."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence

import torch

from .errors import CheckpointError
from .formats import load
from .state import CheckpointState, OptimizerGroup, Value, is_string, same_number, same_tensor
from .storage import PathLike, Progress, as_path, warn

_CHUNK = 1 << 22  # elements: 32 MiB of float64


def average(
    states_or_paths: Sequence[CheckpointState | PathLike], weights: Sequence[float] | None = None, *, progress: Progress | None = None
) -> CheckpointState:
    """The weighted mean of parameters and moments; weights need not sum to one.

    Sums run in float64 and are rounded once. Integers are rounded to the nearest; booleans and strings must agree. Properties are kept
    where all inputs agree. The step is the furthest of all.
    """
    sources = list(states_or_paths)
    if not sources:
        raise CheckpointError("nothing to average", remedy="Give at least one checkpoint.")
    shares = _normalised(weights, len(sources))
    labels = [os.fspath(as_path(source)) if not isinstance(source, CheckpointState) else f"state {n}" for n, source in enumerate(sources)]
    states = [source if isinstance(source, CheckpointState) else load(source) for source in sources]
    own = [buffer for source, state in zip(sources, states, strict=True) if source is not state for buffer in state._buffers]
    for label, state in zip(labels, states, strict=True):
        _check_same_tensors(states[0], state, label)
    work = _Averager(shares, labels, lambda: [buffer.release() for buffer in own], progress)
    first = states[0]
    result = CheckpointState(
        trainable=work.tensors([state.trainable for state in states]),
        frozen=work.tensors([state.frozen for state in states]),
        partitions=dict(first.partitions),
        properties=_common_properties(states),
    )
    for name in first.optimizer:
        result.optimizer[name] = _group([state.optimizer[name] for state in states], work, name)
    for name, alias in first.mixed_precision.items():
        result.mixed_precision[name] = result.parameters[name].to(alias.dtype)
    return result


class _Averager:
    def __init__(self, shares: list[float], labels: list[str], release: Callable[[], object], progress: Progress | None) -> None:
        self.shares, self.labels, self.release, self.progress = shares, labels, release, progress

    def tensors(self, many: list[Mapping[str, Value]]) -> dict[str, Value]:
        return {name: self.one(name, [values[name] for values in many]) for name in many[0]}

    def one(self, name: str, values: list[Value]) -> Value:
        first = values[0]
        if is_string(first) or first.dtype == torch.bool:
            for label, value in zip(self.labels, values, strict=True):
                if not same_tensor(first, value):
                    raise CheckpointError(
                        "differs between the inputs and can't be averaged",
                        path=label,
                        field=name,
                        remedy="Leave the checkpoint out; `torch-ort-ckpt diff` shows the difference.",
                    )
            return first.copy() if is_string(first) else first.clone()
        result = torch.empty(first.shape, dtype=first.dtype)
        flat = result.reshape(-1)
        sources = [value.reshape(-1) for value in values]
        for start in range(0, flat.numel(), _CHUNK):
            piece = slice(start, start + _CHUNK)
            flat[piece] = self._mean([source[piece].cpu() for source in sources], first.dtype)
            self.release()
            if self.progress:
                self.progress(flat[piece].numel() * first.element_size() * len(values))
        return result

    def _mean(self, pieces: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        if all(same_tensor(pieces[0], piece) for piece in pieces[1:]):
            return pieces[0]  # exact, also for integers beyond 2^53 and whatever a NaN holds
        total = torch.zeros(pieces[0].shape, dtype=torch.float64)
        for share, piece in zip(self.shares, pieces, strict=True):
            total.add_(piece.to(torch.float64), alpha=share)
        return (total if dtype.is_floating_point else total.round()).to(dtype)


def _group(groups: list[OptimizerGroup], work: _Averager, name: str) -> OptimizerGroup:
    first = groups[0]
    step = max(group.step for group in groups)
    if any(group.step != step for group in groups):
        warn(f"{name}: the inputs are at different steps ({min(group.step for group in groups)} to {step}); the result takes {step}")
    rates = {group.lr for group in groups}
    states = {
        param: work.tensors([{key: value for key, value in group.states[param].items() if key != "step"} for group in groups])
        for param in first.states
    }
    return OptimizerGroup(step, first.initial_lr, first.lr if len(rates) == 1 else None, states, dict(first.hyperparameters))


def _check_same_tensors(first: CheckpointState, state: CheckpointState, label: str) -> None:
    if state.nominal:
        raise CheckpointError("a nominal checkpoint has no values to average", path=label, remedy="Leave it out, or give it weights first.")
    wanted = {key: value for key, value in first.tensors() if not key.endswith("/step") or not key.startswith("optimizer/")}
    found = {key: value for key, value in state.tensors() if not key.endswith("/step") or not key.startswith("optimizer/")}
    if odd := sorted(wanted.keys() ^ found.keys()):
        raise CheckpointError(
            f"{'has' if odd[0] in found else 'lacks'} this tensor, unlike the first input",
            path=label,
            field=odd[0],
            remedy="Average checkpoints of one model, all with or all without optimizer state.",
        )
    for key, value in wanted.items():
        other = found[key]
        if is_string(value) != is_string(other) or value.shape != other.shape or value.dtype != other.dtype:
            raise CheckpointError(
                f"{tuple(other.shape)} {other.dtype}, the first input has {tuple(value.shape)} {value.dtype}",
                path=label,
                field=key,
                remedy="Average checkpoints of one model only; `torch-ort-ckpt diff` shows where they part.",
            )


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


def _normalised(weights: Sequence[float] | None, count: int) -> list[float]:
    given = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(given) != count:
        raise CheckpointError(
            f"{len(given)} weights for {count} checkpoints", remedy="Give one weight for each checkpoint, in their order."
        )
    total = math.fsum(given)
    if not all(math.isfinite(weight) and weight >= 0 for weight in given) or not total > 0:
        raise CheckpointError(
            "weights must be finite, not negative, and not all zero", remedy="Use for example the number of samples behind each checkpoint."
        )
    return [weight / total for weight in given]
