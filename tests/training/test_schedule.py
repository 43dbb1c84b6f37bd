"""Learning rates against ORT's own schedulers, and the checkpoint period against a search and a simulation."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

import torch_ort_ckpt as toc


@pytest.mark.ort
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.25])
@pytest.mark.parametrize("mode", ["constant", "linear", "cosine", "poly"])
def test_the_rates_are_those_of_orts_schedulers(mode: str, warmup: float) -> None:
    from onnxruntime.training.optim import lr_scheduler

    total, rate = 40, 0.02
    kind = getattr(lr_scheduler, f"{mode.capitalize()}WarmupLRScheduler")
    theirs = kind(total_steps=total, warmup=warmup)
    mine = toc.LearningRate(rate, mode, warmup)
    for step in range(total + 1):
        info = SimpleNamespace(optimization_step=step, optimizer_config=SimpleNamespace(lr=rate))
        assert rate * mine.factor(total, step) == pytest.approx(theirs.get_lr(info)[0], rel=1e-12, abs=1e-18)


def test_the_scheduler_drives_the_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=9.0)
    scheduler = toc.LearningRate(0.1, "linear", 0.5).scheduler(optimizer, 4)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.0, 0.05, 0.1, 0.05])


@pytest.mark.parametrize("nodes", [1, 100, 10_000])
@pytest.mark.parametrize("save", [0.5, 30.0, 600.0])
def test_no_other_period_wastes_less(save: float, nodes: int) -> None:
    best = toc.optimal_checkpoint_period(save, 50_000, nodes, restart_seconds=120, step_seconds=0.5)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        other = toc.optimal_checkpoint_period(save, 50_000, nodes, restart_seconds=120, period_seconds=best.period_seconds * factor)
        assert other.efficiency < best.efficiency
    assert best.saving + best.lost + best.efficiency == pytest.approx(1)
    assert best.period_steps == round(best.period_seconds / 0.5)


def test_it_tends_to_youngs_rule_when_failures_are_rare() -> None:
    save, mtbf = 1.0, 1000 * 3600.0
    assert toc.optimal_checkpoint_period(save, 1000).period_seconds == pytest.approx((2 * save * mtbf) ** 0.5, rel=1e-3)


def test_the_efficiency_is_what_a_simulated_run_shows() -> None:
    save, restart, mtbf = 20.0, 60.0, 3600.0
    plan = toc.optimal_checkpoint_period(save, 1.0, restart_seconds=restart)
    generator = random.Random(0)
    clock = work = 0.0
    failure = generator.expovariate(1 / mtbf)
    while work < 3e6:
        end = clock + plan.period_seconds + save
        if end <= failure:
            clock, work = end, work + plan.period_seconds
            continue
        clock = failure
        while True:  # a restart can fail too
            failure = clock + generator.expovariate(1 / mtbf)
            if clock + restart <= failure:
                clock += restart
                break
            clock = failure
    assert work / clock == pytest.approx(plan.efficiency, rel=0.02)


@pytest.mark.parametrize("bad", [{"save_seconds": 0.0}, {"nodes": 0}, {"node_mtbf_hours": float("inf")}, {"restart_seconds": -1.0}])
def test_impossible_figures_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(toc.CheckpointError, match=next(iter(bad))):
        toc.optimal_checkpoint_period(**{"save_seconds": 1.0, "node_mtbf_hours": 1.0, **bad})  # type: ignore[arg-type]
