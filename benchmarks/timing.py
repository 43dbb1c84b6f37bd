"""Interleaved timing: every contender once per round, in turn, so that a slow minute of the machine is slow for all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable


def interleaved(
    contenders: dict[str, Callable[[], object]],
    rounds: int,
    between: Callable[[], object] = lambda: None,
    pick: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Median (or what `pick` takes) of the seconds of each contender over `rounds`, after one warm-up round. `between` runs before each
    call, outside the clock."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            between()
            gc.collect()
            start = time.perf_counter()
            result = run()
            spent = time.perf_counter() - start
            del result
            if number:
                times[name].append(spent)
    return {name: pick(values) for name, values in times.items()}


def table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, ready for the README."""
    lines = [f"\n### {title}\n", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
