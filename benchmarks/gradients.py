"""Artifacts whose gradients PyTorch made against those of ONNX Runtime's own builder: the same AdamW step of `onnxruntime.training.api`.

    python -m benchmarks.gradients [--only mlp,cnn] [--rounds 9] [--pairs 3] [--plain]

Every contender is a process of its own with one thread, and they take turns: a round is some steps of each. What counts is the CPU time
of the process, so that other work on the machine disturbs little; a figure is the median over pairs of processes (where the memory of a
model happens to lie can make it slower for as long as it lives) of the ratio of the least times. The loss is compared over the first ten
steps, on batches of three sizes. Memory is the peak of a process beyond what it held before it loaded the model; PyTorch's is that of the
same steps in eager mode.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import table

SIZES = (1.0, 0.5, 1.25)
"""The batches on which losses are compared, relative to the timed one."""


def models() -> dict[str, tuple[Callable[[], Any], Callable[[int], Any], int]]:
    """Name -> how to make the module, how to make a batch, and its usual size."""
    import torch
    from torch import nn

    from benchmarks.runtime import MODELS

    def depthwise() -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
        for a, b in itertools.pairwise([32, 64, 128, 128]):
            layers += [nn.Conv2d(a, a, 3, padding=1, groups=a, bias=False), nn.BatchNorm2d(a), nn.ReLU()]
            layers += [nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))

    return {
        "mlp": (MODELS["mlp"][0], lambda n: torch.randn(n, 784), 64),
        "cnn": (MODELS["cnn"][0], lambda n: torch.randn(n, 3, 32, 32), 16),
        "transformer": (MODELS["transformer"][0], lambda n: torch.randint(0, 1000, (n, 64)), 8),
        "depthwise": (depthwise, lambda n: torch.randn(n, 3, 32, 32), 16),
        "many": (MODELS["many"][0], lambda n: torch.randn(n, 16), 32),
    }


def module_of(name: str) -> Any:
    import torch

    torch.manual_seed(0)
    return models()[name][0]()


def resident(field: str) -> float:
    """VmRSS or VmHWM of this process in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def official(folder: Path) -> Callable[[Any, Any], float]:
    """A step of ONNX Runtime's API on the artifacts in `folder`."""
    import onnxruntime
    from onnxruntime.training import api

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"), "cpu", options)
    optimizer = api.Optimizer(str(folder / "optimizer_model.onnx"), module)

    def step(x: Any, y: Any) -> float:
        loss = module(x, y)
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss)

    return step


def eager(name: str) -> Callable[[Any, Any], float]:
    """The same step in PyTorch."""
    import torch

    torch.set_num_threads(1)
    module = module_of(name)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def step(x: Any, y: Any) -> float:
        loss = torch.nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def worker(pipe: Connection, name: str, folder: Path | None, batches: Path) -> None:
    """Sends losses and memory of the first steps, then the CPU seconds of as many steps as it is told."""
    if folder is None:
        import torch

        tiny = torch.nn.Linear(2, 2)  # PyTorch loads parts of itself with the first step
        tiny(torch.ones(1, 2)).sum().backward()
        torch.optim.AdamW(tiny.parameters(), fused=True).step()
    else:
        from onnxruntime.training import api  # noqa: F401
    held = dict(np.load(batches))
    pairs = [(held[f"x{i}"], held[f"y{i}"]) for i in range(len(SIZES))]
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    step = eager(name) if folder is None else official(folder)
    for _ in range(3):  # memory at the usual size
        step(*pairs[0])
    peak = resident("VmHWM") - before
    step = eager(name) if folder is None else official(folder)
    losses = [step(*pairs[i % len(pairs)]) for i in range(10)]
    pipe.send((losses, peak))
    while count := pipe.recv():
        start = time.process_time()
        for _ in range(count):
            step(*pairs[0])
        pipe.send((time.process_time() - start) / count)


def compare(name: str, folders: dict[str, Path | None], batches: Path, rounds: int, budget: float) -> dict[str, tuple[float, Any, float]]:
    """Contender -> the least CPU seconds of a step over the rounds, its losses, its peak memory."""
    context = multiprocessing.get_context("spawn")
    pipes, processes, first = {}, [], {}
    for label, folder in folders.items():
        pipes[label], far = context.Pipe()
        processes.append(context.Process(target=worker, args=(far, name, folder, batches)))
        processes[-1].start()
        far.close()
        first[label] = pipes[label].recv()
    counts = {}
    for label, pipe in pipes.items():
        pipe.send(2)
        counts[label] = max(2, int(budget / max(pipe.recv(), 1e-6)))
    spent: dict[str, list[float]] = {label: [] for label in folders}
    for _ in range(rounds):
        for label, pipe in pipes.items():
            pipe.send(counts[label])
            spent[label].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(0)
    for process in processes:
        process.join()
    return {label: (min(spent[label]), *first[label]) for label in folders}


def export(name: str, place: Path, plain: bool) -> tuple[dict[str, Path | None], Path]:
    """Artifacts of both builders, and the batches."""
    import torch

    import torch_ort_ckpt as toc

    _, sample, size = models()[name]
    torch.manual_seed(1)
    held = {}
    for i, factor in enumerate(SIZES):
        x = sample(int(size * factor))
        held |= {f"x{i}": x.numpy(), f"y{i}": torch.randint(0, 10, (len(x),)).numpy()}
    np.savez(place / "batches.npz", **held)
    folders: dict[str, Path | None] = {"ort": place / "ort", "ours": place / "ours"}
    example = (torch.from_numpy(held["x0"]),)
    toc.export_artifacts(module_of(name), example, place / "ort", builder="ort")
    toc.export_artifacts(module_of(name), example, place / "ours")
    if plain:
        folders["plain"] = place / "plain"
        toc.export_artifacts(module_of(name), example, place / "plain", optimize=False)
    return folders | {"torch": None}, place / "batches.npz"


def row(name: str, options: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory() as work:
        place = Path(options.keep or work) / name
        if not (place / "batches.npz").exists():
            place.mkdir(parents=True)
            folders, batches = export(name, place, options.plain)
        else:
            folders = {label: place / label for label in ("ort", "ours", "plain") if (place / label).exists()} | {"torch": None}
            batches = place / "batches.npz"
        found = [compare(name, folders, batches, options.rounds, options.budget) for _ in range(options.pairs)]
    times = {label: [pair[label][0] / pair["ort"][0] for pair in found] for label in folders}
    memory = {label: statistics.median(pair[label][2] for pair in found) for label in folders}
    losses = {label: found[0][label][1] for label in folders}
    cells = [name, f"{statistics.median(pair['ort'][0] for pair in found) * 1e6:.0f} us"]
    for label in ("ours", "plain", "torch"):
        if label in times:
            cells.append(f"{statistics.median(times[label]):.2f} ({min(times[label]):.2f} to {max(times[label]):.2f})")
        elif label == "plain":
            cells.append("")
    cells.append(" / ".join(f"{memory[label]:.0f}" for label in ("ort", "ours", "torch")))
    cells.append(f"{memory['ours'] / max(memory['ort'], memory['torch']):.2f}")
    for label in ("ort", "torch"):
        cells.append(f"{max(abs(a - b) for a, b in zip(losses['ours'], losses[label], strict=True)):.1e}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="mlp,cnn,transformer,depthwise,many")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pairs", type=int, default=3, help="groups of processes, each started anew")
    parser.add_argument("--budget", type=float, default=0.2, help="CPU seconds of a contender in a round")
    parser.add_argument("--plain", action="store_true", help="also without fast forms (optimize=False)")
    parser.add_argument("--keep", help="folder for the artifacts; those that are there are taken as they are")
    options = parser.parse_args()
    header = [
        "model",
        "ORT-made",
        "ours",
        "ours, plain",
        "PyTorch",
        "MB: ORT-made / ours / PyTorch",
        "to the larger",
        "loss off ORT's",
        "off PyTorch's",
    ]
    rows = []
    for name in options.only.split(","):
        rows.append(row(name, options))
        print(" | ".join(rows[-1]), flush=True)
    print(table("A step of ONNX Runtime's training API: CPU time relative to ORT-made artifacts", header, rows))


if __name__ == "__main__":
    main()
