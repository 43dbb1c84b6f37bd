"""What each private name of PyTorch buys, and ONNX Runtime's C API by slot: the time of a step without it, as a ratio to the step with it.

    python -m benchmarks.private_names [--only many,mlp,cnn] [--rounds N] [--names part,part]

For each name the package is imported again with the name missing, so that its fallback is used; both copies then train the same artifacts
in one process, in turn. A ratio is the median over the rounds of the times of the two in the same round. "none" compares two copies
that both have every name: it shows the noise.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .runtime import MODELS

PACKAGE = "torch_ort_ckpt"
SLOTS = "ONNX Runtime's C API by slot"
COUNTERS = "BatchNorm's counters without PyTorch"
WORKLOADS = ("autograd, graph", "train_step, graph", "accumulated, fused, clipped", "update alone, graph")


@contextlib.contextmanager
def without(path: str) -> Iterator[None]:
    """The name is missing while the package is imported: PyTorch itself may need it when it runs."""
    *parts, last = path.split(".")
    place: Any = torch
    for number, part in enumerate(parts):
        place = getattr(place, part, None) or sys.modules[".".join(["torch", *parts[: number + 1]])]
    kept = vars(place).get(last)
    if kept is not None:
        delattr(place, last)
    else:  # of a base class in C++, which can't be changed
        setattr(place, last, None)
    try:
        yield
    finally:
        delattr(place, last) if kept is None else setattr(place, last, kept)


def fresh(missing: str | None) -> Any:
    """A copy of the package of its own, in which the name is missing."""
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    names = ("pytorch_private", "engines.ort.gradients", "engines.ort.graph_updates", "runtime.session", "graphs.export")
    hidden = without(missing) if missing not in (None, SLOTS, COUNTERS) else contextlib.nullcontext()
    with hidden:
        for name in names:
            importlib.import_module(f"{PACKAGE}.{name}")
    if missing == SLOTS:
        importlib.import_module(f"{PACKAGE}.engines.ort.graph_updates").available = lambda: False
    return importlib.import_module(PACKAGE)


def workloads(missing: str | None, folder: str, batch: tuple[torch.Tensor, ...]) -> dict[str, Callable[[], None]]:
    toc = fresh(missing)
    model = toc.OrtModule(folder, engine="ort", threads=1)
    optimizer, fused = toc.OrtOptimizer(model), toc.OrtOptimizer(model, fused=True)
    optimizer.create_moments()
    fused.load_state_dict(optimizer.state_dict())
    if missing == COUNTERS:
        from torch_ort_ckpt.pytorch_private import foreach_add_
        from torch_ort_ckpt.runtime.scopes import lookup

        def count() -> None:
            with torch.no_grad():
                foreach_add_([lookup(*place) for place in model._counters], 1)

        object.__setattr__(model, "_count_batches", count)
    parameters = list(model.parameters())
    clip_gradients = importlib.import_module(f"{PACKAGE}.engines.updates").clip_gradients

    def with_autograd() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def without_autograd() -> None:
        model.train_step(*batch)
        optimizer.step()
        model.lazy_reset_grad()

    def accumulated() -> None:
        model.train_step(*batch)
        model.train_step(*batch)
        clip_gradients([parameter.grad for parameter in parameters if parameter.grad is not None], 1.0)
        fused.step()
        fused.zero_grad()

    def update_alone() -> None:
        if parameters[0].grad is None:
            model.train_step(*batch)
        optimizer.step()

    found = dict(zip(WORKLOADS, (with_autograd, without_autograd, accumulated, update_alone), strict=True))
    for run in found.values():
        for _ in range(5):
            run()
    return found


def compare(one: Callable[[], None], other: Callable[[], None], rounds: int, budget: float) -> tuple[float, float]:
    """Median microseconds of `one`, and the median ratio of `other` to it."""
    start = time.perf_counter()
    one()
    count = max(2, int(budget / (time.perf_counter() - start)))
    base, ratios = [], []
    for number in range(rounds):
        times = {}
        for run in (one, other) if number % 2 else (other, one):
            start = time.perf_counter()
            for _ in range(count):
                run()
            times[run] = (time.perf_counter() - start) / count
        base.append(times[one])
        ratios.append(times[other] / times[one])
    return statistics.median(base) * 1e6, statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="many,mlp,cnn")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=0.05, help="seconds per side and round")
    parser.add_argument("--names", default="", help="only names with one of these parts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names: list[str] = [*importlib.import_module(f"{PACKAGE}.pytorch_private").NAMES, SLOTS, COUNTERS]
    chosen = [name for name in names if any(part in name for part in options.names.split(","))]
    for model_name in options.only.split(","):
        make, sample = MODELS[model_name]
        torch.manual_seed(0)
        batch = sample(), torch.randint(0, 10, (len(sample()),))
        print(f"\n| {model_name}, without | " + " | ".join(WORKLOADS) + " |\n|" + "---|" * (len(WORKLOADS) + 1), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            fresh(None).export_artifacts(make(), batch[:1], folder, exporter="torchscript")
            for missing in (None, *chosen):
                if missing == COUNTERS and model_name != "cnn":  # the only one with BatchNorm
                    continue
                usual = workloads(None, folder, batch)  # as new as the other: a model's place in memory matters
                other = workloads(missing, folder, batch)
                found = [compare(usual[name], other[name], options.rounds, options.budget) for name in WORKLOADS]
                cells = " | ".join(f"{ratio:.2f} ({base:.0f} us)" for base, ratio in found)
                print(f"| {missing or 'none'} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
