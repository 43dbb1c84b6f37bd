"""What a checkpoint tells about its training: how far the last update moved each weight, and units that are dead or have exploded."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ..checkpoint.state import CheckpointState, OptimizerGroup, Value, is_string

EXPLODING = 10.0
"""A unit whose weights are this many times as large as those of the middle unit of its layer is marked."""

_CHUNK = 1 << 22


def update_ratios(state: CheckpointState) -> dict[str, float]:
    """Parameter -> the size (RMS) of the last update, as its moments and the rate give it, against the size of the weight.

    About 1e-3 is usual. Much more means a rate that is too high; much less, a layer that hardly learns.
    """
    found = {}
    for group in state.optimizer.values():
        rate = group.lr if group.lr is not None else group.initial_lr
        for name, moments in group.states.items():
            weight = state.trainable.get(name)
            if weight is None or is_string(weight) or weight.is_meta or not weight.numel() or not weight.is_floating_point():
                continue
            size, moved = _mean_square(weight), _update(group, moments)
            if size > 0 and moved is not None and math.isfinite(moved):
                found[name] = rate * math.sqrt(moved / size)
    return found


def _mean_square(value: torch.Tensor) -> float:
    flat = value.detach().reshape(-1)
    total = sum(float(flat[start : start + _CHUNK].cpu().double().square().sum()) for start in range(0, flat.numel(), _CHUNK))
    return total / flat.numel()


def _update(group: OptimizerGroup, moments: Mapping[str, Value]) -> float | None:
    """The mean square of the update that the moments made, at a rate of 1 and without weight decay."""
    first, second = moments.get("momentum0"), moments.get("momentum1")
    if not isinstance(first, torch.Tensor) or first.is_meta:
        return None
    if not isinstance(second, torch.Tensor):
        return _mean_square(first)
    step = max(int(moments["step"]) if "step" in moments else group.step, 1)
    beta1, beta2 = (float(beta) for beta in group.hyperparameters.get("betas", (0.9, 0.999)))
    eps = float(group.hyperparameters.get("eps", 1e-8))
    total, flat = 0.0, (first.detach().reshape(-1), second.detach().reshape(-1))
    for start in range(0, first.numel(), _CHUNK):
        m, v = (piece[start : start + _CHUNK].cpu().double() for piece in flat)
        change = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps)
        total += float(change.square().sum())
    return total / max(first.numel(), 1)


def odd_units(value: Value) -> str:
    """How many output units of a weight are all zeros, or far larger than the others: "2 dead, 1 exploding"."""
    if is_string(value) or value.is_meta or value.ndim < 2 or not value.numel() or not value.is_floating_point():
        return ""
    rows = value.detach().reshape(value.shape[0], -1)
    step = max(1, _CHUNK // rows.shape[1])
    norms = torch.cat([rows[start : start + step].cpu().double().norm(dim=1) for start in range(0, len(rows), step)])
    dead = int((norms == 0).sum())
    middle = float(norms[norms > 0].median()) if dead < len(norms) else 0.0
    exploding = int((norms > EXPLODING * middle).sum()) if middle and math.isfinite(middle) else 0
    return ", ".join(f"{count} {what}" for count, what in ((dead, "dead"), (exploding, "exploding")) if count)
