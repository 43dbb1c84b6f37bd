"""How often to save, and what it costs, against the number of nodes.

    python examples/optimal_period.py [--save-seconds 12] [--mtbf-hours 50000] [--restart-seconds 300] [--step-seconds 1.5] [--plot out.png]

Prints a table. `--plot` needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch_ort_ckpt as toc
from torch_ort_ckpt.training.schedule import CheckpointPlan

NODES = (1, 8, 64, 256, 1024, 4096, 16384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-seconds", type=float, default=12.0, help="what one save costs the training loop (measure it)")
    parser.add_argument("--mtbf-hours", type=float, default=50_000.0, help="mean time between failures of one node")
    parser.add_argument("--restart-seconds", type=float, default=300.0, help="from a failure to the first new step")
    parser.add_argument("--step-seconds", type=float, default=1.5)
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()

    def plan(nodes: int, period: float | None = None) -> CheckpointPlan:
        return toc.optimal_checkpoint_period(
            options.save_seconds,
            options.mtbf_hours,
            nodes,
            restart_seconds=options.restart_seconds,
            step_seconds=options.step_seconds,
            period_seconds=period,
        )

    print("| nodes | failures per day | save every | steps | saving | lost work | efficiency | hourly instead |")
    print("|---|---|---|---|---|---|---|---|")
    for nodes in NODES:
        best, hourly = plan(nodes), plan(nodes, 3600.0)
        print(
            f"| {nodes} | {best.failures_per_day:.3g} | {best.period_seconds / 60:.1f} min | {best.period_steps} | {best.saving:.2%} "
            f"| {best.lost:.2%} | {best.efficiency:.2%} | {hourly.efficiency:.2%} |"
        )
    if options.plot:
        draw(options.plot, plan)


def draw(path: str, plan: Callable[..., CheckpointPlan]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    for nodes in NODES[2:]:
        best = plan(nodes)
        periods = [best.period_seconds * 10 ** (number / 10) for number in range(-12, 13)]
        axes.plot([p / 60 for p in periods], [plan(nodes, p).efficiency for p in periods], label=f"{nodes} nodes")
        axes.plot(best.period_seconds / 60, best.efficiency, "ko")
    axes.set(xscale="log", xlabel="minutes between saves", ylabel="useful fraction of the time", title="Checkpoint period")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
