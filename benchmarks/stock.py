"""A whole training step on a stock onnxruntime: against PyTorch, and against official ORT training, as ratios (below 1 is faster).

    python -m benchmarks.stock --stock /path/to/python-with-stock-onnxruntime [--only mlp,cnn,...] [--threads 1]

Run it where onnxruntime-training is installed; `--stock` names the Python of another environment, with this package, torch and onnxruntime.
Each of them is a worker process of its own. The workers take turns, a block of steps each; the figures are CPU time (of all threads), so
that other programs on the machine disturb them little, and medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from benchmarks.runtime import MODELS, official


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
        for size, wider in ((32, 64), (64, 128)):
            parts += [nn.Conv2d(size, size, 3, padding=1, groups=size, bias=False), nn.BatchNorm2d(size), nn.ReLU()]
            parts += [nn.Conv2d(size, wider, 1, bias=False), nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2)]
        self.parts, self.fc = nn.Sequential(*parts), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.parts(x).mean((2, 3)))


SUBJECTS = {**MODELS, "depthwise": (Depthwise, lambda: torch.randn(16, 3, 32, 32))}
Steps = dict[str, Callable[[], Any]]


def subject(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    make, sample = SUBJECTS[name]
    x = sample()
    return make(), x, torch.randint(0, 10, (len(x),))


def official_steps(name: str, folder: Path, threads: int | None) -> Steps:
    _, x, y = subject(name)
    batch = x.numpy(), y.numpy()
    found: Steps = {}
    for made in ("ort", "ours"):
        module, optimizer = official(toc.Artifacts.load(folder / made), threads)

        def step(module: Any = module, optimizer: Any = optimizer) -> None:
            module(*batch)
            optimizer.step()
            module.lazy_reset_grad()

        found[f"official, graphs of {made}"] = step
    return found


def stock_steps(name: str, folder: Path, threads: int | None) -> Steps:
    found: Steps = {"step model": step_model(folder / "step", subject(name), threads)}
    for fused in (False, True):
        model = toc.OrtModule(folder / "ours", engine="ort", threads=threads)
        optimizer = toc.OrtOptimizer(model, lr=1e-3, fused=fused)
        _, x, y = subject(name)

        def step(model: Any = model, optimizer: Any = optimizer, x: Any = x, y: Any = y) -> None:
            model.train_step(x, y)
            optimizer.step()
            model.lazy_reset_grad()

        found[f"OrtModule, {'fused' if fused else 'graph'} optimizer"] = step
    for compiled in (False, True):
        native, x, y = subject(name)
        optimizer = torch.optim.AdamW(native.parameters(), lr=1e-3, fused=True)
        forward = torch.compile(native) if compiled else native

        def torch_step(forward: Any = forward, optimizer: Any = optimizer, x: Any = x, y: Any = y) -> None:
            F.cross_entropy(forward(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        if not (compiled and name == "many"):  # compiling 300 layers takes longer than all the rest
            found["torch compiled" if compiled else "torch eager"] = torch_step
    return found


def step_model(folder: Path, given: tuple[nn.Module, torch.Tensor, torch.Tensor], threads: int | None) -> Callable[[], None]:
    """With two sets of states: each step reads one and writes the other."""
    import onnxruntime
    from safetensors.torch import load_file

    from torch_ort_ckpt.engines.ort.dlpack import to_ort

    options = onnxruntime.SessionOptions()
    if threads:
        options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(folder / "step_model.onnx"), options, providers=["CPUExecutionProvider"])
    state = load_file(folder / "state.safetensors")
    sets = [state, {name: value.clone() for name, value in state.items()}]
    rate, number = torch.tensor(1e-3), torch.tensor(1)
    loss = torch.zeros(())
    data = [value.name for value in session.get_inputs() if value.name not in {*state, "lr", "step"}]
    fixed = {**dict(zip(data, given[1:], strict=True)), "lr": rate, "step": number}
    bindings = []
    for source, target in (sets, sets[::-1]):
        io = session.io_binding()._iobinding
        for name, value in {**fixed, **source}.items():
            io.bind_ortvalue_input(name, to_ort(value))
        io.bind_ortvalue_output(session.get_outputs()[0].name, to_ort(loss))
        for name, value in target.items():
            io.bind_ortvalue_output(f"{name}.new", to_ort(value))
        bindings.append(io)

    def step() -> None:
        session._sess.run_with_iobinding(bindings[int(number) % 2], None)
        number.add_(1)

    return step


def work(kind: str, name: str, folder: Path, threads: int | None) -> None:
    """A worker: reads a contender and a number of steps, answers with the CPU seconds of a step."""
    if threads:
        torch.set_num_threads(threads)
    steps = (official_steps if kind == "official" else stock_steps)(name, folder, threads)
    for step in steps.values():
        for _ in range(3):
            step()
    print(json.dumps(list(steps)), flush=True)
    for line in sys.stdin:
        wanted, count = json.loads(line)
        step, start = steps[wanted], time.process_time()
        for _ in range(count):
            step()
        print(json.dumps((time.process_time() - start) / count), flush=True)


class Worker:
    def __init__(self, python: str, *arguments: str) -> None:
        command = [python, "-m", "benchmarks.stock", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.contenders: list[str] = json.loads(self.process.stdout.readline())

    def run(self, contender: str, count: int) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([contender, count]), file=self.process.stdin, flush=True)
        return float(json.loads(self.process.stdout.readline()))

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(name: str, stock: str, threads: int | None, rounds: int, budget: float) -> dict[str, float]:
    """CPU seconds of a step of each contender."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        module, x, _ = subject(name)
        toc.export_artifacts(module, (x,), folder / "ours")
        toc.export_artifacts(module, (x,), folder / "ort", builder="ort")
        toc.export_step_model(folder / "ours", folder / "step")
        common = ["--only", name, "--folder", place, *(["--threads", str(threads)] if threads else [])]
        workers = [Worker(sys.executable, "--worker", "official", *common), Worker(stock, "--worker", "stock", *common)]
        turns = [(worker, contender) for worker in workers for contender in worker.contenders]
        counts = {contender: max(2, int(budget / max(worker.run(contender, 2), 1e-6))) for worker, contender in turns}
        found: dict[str, list[float]] = {contender: [] for _, contender in turns}
        for _ in range(rounds):
            for worker, contender in turns:
                found[contender].append(worker.run(contender, counts[contender]))
        for worker in workers:
            worker.end()
    return {contender: statistics.median(times) for contender, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stock", default=sys.executable)
    parser.add_argument("--only", default=",".join(SUBJECTS))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=0.2, help="CPU seconds of a block of steps")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.only, Path(args.folder), args.threads)
        return
    for name in args.only.split(","):
        times = compare(name, args.stock, args.threads, args.rounds, args.budget)
        base = times["official, graphs of ort"]
        print(f"{name}: official ORT training {base * 1e6:.0f} us")
        for contender, spent in times.items():
            print(f"  {spent / base:5.2f}  {contender}")


if __name__ == "__main__":
    main()
