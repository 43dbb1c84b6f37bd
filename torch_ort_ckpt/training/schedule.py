"""Learning rates with warm-up as in ORT's trainers, as a factor for PyTorch's `LambdaLR`; and how often to save."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..errors import CheckpointError

WARMUP_MODES = ("none", "constant", "linear", "cosine", "poly")


@dataclass(frozen=True)
class LearningRate:
    """`initial` rises from 0 over the first `warmup` (a fraction) of the updates, then follows `mode`.

    none: no warm-up, no decay; constant: stays; linear: to 0; cosine: half a cosine to 0; poly: to `final` by `(1 - x) ** power`.
    """

    initial: float = 1e-3
    mode: str = "none"
    warmup: float = 0.0
    power: float = 1.0
    final: float = 1e-7

    def __post_init__(self) -> None:
        if self.mode not in WARMUP_MODES:
            raise CheckpointError(f"{self.mode!r} is not one of {', '.join(WARMUP_MODES)}", field="lr.mode")
        if not self.initial > 0:
            raise CheckpointError(f"must be positive, not {self.initial}", field="lr.initial")
        if not 0 <= self.warmup < 1:
            raise CheckpointError(f"must be a fraction from 0 to less than 1, not {self.warmup}", field="lr.warmup")
        if self.mode == "poly" and not 0 <= self.final < self.initial:
            raise CheckpointError(f"must be less than the initial rate, not {self.final}", field="lr.final")

    def factor(self, total: int, updates: int) -> float:
        """What the initial rate is multiplied by after `updates` of `total` weight updates."""
        if self.mode == "none":
            return 1.0
        warm = self.warmup * total
        if updates < warm:
            return updates / max(1.0, warm)
        if self.mode == "constant":
            return 1.0
        done = (updates - warm) / max(1.0, total - warm)
        if self.mode == "linear":
            return max(0.0, total - updates) / max(1.0, total - warm)
        if self.mode == "cosine":
            return max(0.0, 0.5 * (1 + math.cos(math.pi * done)))
        end = self.final / self.initial
        return end if updates > total else (1 - end) * (1 - done) ** self.power + end

    def scheduler(self, optimizer: Optimizer, total: int) -> LambdaLR:
        """Call its `step` after each weight update."""
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = self.initial
        return LambdaLR(optimizer, functools.partial(self.factor, total))


@dataclass(frozen=True)
class CheckpointPlan:
    """How often to save, and what it costs: fractions of the run's wall-clock time."""

    period_seconds: float
    period_steps: int | None
    failures_per_day: float
    saving: float
    lost: float
    efficiency: float


def optimal_checkpoint_period(
    save_seconds: float,
    node_mtbf_hours: float,
    nodes: int = 1,
    *,
    restart_seconds: float = 0.0,
    step_seconds: float | None = None,
    period_seconds: float | None = None,
) -> CheckpointPlan:
    """The time between saves that minimizes lost time, if each node fails at random once in `node_mtbf_hours` on average.

    `save_seconds` is what a save costs the training loop (with `async_save` only the copy), `restart_seconds` what passes from a failure
    to the first new step. `period_seconds` computes the costs of another period instead. After Daly (2006), without his approximation:
    with failures at rate 1/M, work W done in pieces of T takes `M e^(R/M) (e^((T+S)/M) - 1) W/T`, least where
    `(1 - T/M) e^((T+S)/M) = 1`.
    """
    for name, value in (("save_seconds", save_seconds), ("node_mtbf_hours", node_mtbf_hours), ("nodes", nodes)):
        if not (value > 0 and math.isfinite(value)):
            raise CheckpointError(f"must be positive, not {value}", field=name)
    if not restart_seconds >= 0:
        raise CheckpointError(f"can't be negative: {restart_seconds}", field="restart_seconds")
    for name, given in (("step_seconds", step_seconds), ("period_seconds", period_seconds)):
        if given is not None and not given > 0:
            raise CheckpointError(f"must be positive, not {given}", field=name)
    mtbf = node_mtbf_hours * 3600 / nodes
    period = period_seconds if period_seconds is not None else mtbf * _optimum(save_seconds / mtbf)
    stretch = math.exp(restart_seconds / mtbf) * math.expm1((period + save_seconds) / mtbf) * mtbf / period
    efficiency = 1 / stretch
    saving = efficiency * save_seconds / period
    return CheckpointPlan(
        period_seconds=period,
        period_steps=max(1, round(period / step_seconds)) if step_seconds is not None else None,
        failures_per_day=86400 / mtbf,
        saving=saving,
        lost=1 - efficiency - saving,
        efficiency=efficiency,
    )


def _optimum(save: float) -> float:
    """The root t of `log1p(-t) + t + save = 0` in (0, 1), by bisection: the left side falls from `save` to minus infinity."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle < 1 and math.log1p(-middle) + middle + save > 0:
            low = middle
        else:
            high = middle
    return high
