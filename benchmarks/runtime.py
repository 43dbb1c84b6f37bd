"""Time per step against ONNX Runtime's own training API, as ratios (below 1 is faster), interleaved in one process.

    python -m benchmarks.runtime [--threads N] [--only mlp,cnn,transformer,many] [--large]

Without `--threads` both sides run with the defaults a user gets. A ratio is that of the least times over the rounds (another guest of the
machine can only make a round slower), and the median over several pairs of models: where the memory of a model happens to lie can make it
a fifth slower for as long as it lives.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_ort_ckpt as toc


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        channels = [3, 16, 32, 64]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(channels))
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in channels[1:])
        self.pool, self.fc = nn.MaxPool2d(2), nn.Linear(64 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.pool(torch.relu(norm(conv(x))))
        return self.fc(x.flatten(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.fc = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.encoder(self.embedding(x)).mean(1))


class Many(nn.Module):
    """300 small tensors: what the bookkeeping per tensor costs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(149))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * 0.1
        return self.fc(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
        lambda: torch.randn(64, 784),
    ),
    "cnn": (CNN, lambda: torch.randn(16, 3, 32, 32)),
    "transformer": (Transformer, lambda: torch.randint(0, 1000, (8, 64))),
    "many": (Many, lambda: torch.randn(32, 16)),
}


def ratios(ours: dict[str, Callable[[], Any]], theirs: Callable[[], Any], rounds: int, budget: float) -> tuple[float, dict[str, float]]:
    """Least time of `theirs` in microseconds, and the ratio of each of `ours` to it."""
    every = {"theirs": theirs, **ours}
    counts = {}
    for name, run in every.items():
        for _ in range(3):
            run()
        start = time.perf_counter()
        run()
        counts[name] = max(3, int(budget / max(time.perf_counter() - start, 1e-6)))
    found: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(rounds):
        for name, run in every.items():
            time.sleep(0.05)  # ORT's own API leaves its threads spinning for a while
            run()
            start = time.perf_counter()
            for _ in range(counts[name]):
                run()
            found[name].append((time.perf_counter() - start) / counts[name])
    base = min(found.pop("theirs"))
    return base * 1e6, {name: min(times) / base for name, times in found.items()}


def official(artifacts: toc.Artifacts, threads: int | None) -> tuple[Any, Any]:
    import onnxruntime
    from onnxruntime.training import api

    options = onnxruntime.SessionOptions()
    if threads:
        options.intra_op_num_threads = threads
    state = api.CheckpointState.load_checkpoint(str(artifacts.checkpoint_path))
    module = api.Module(str(artifacts.training_path), state, str(artifacts.eval_path), "cpu", options)
    return module, api.Optimizer(str(artifacts.optimizer_path), module)


def compare(name: str, threads: int | None, rounds: int, budget: float) -> list[float]:
    make, sample = MODELS[name]
    torch.manual_seed(0)
    x, y = sample(), torch.randint(0, 10, (len(sample()),))
    with tempfile.TemporaryDirectory() as folder:
        artifacts = toc.export_artifacts(make(), (x,), folder, exporter="torchscript")
        module, their_optimizer = official(artifacts, threads)
        model = toc.OrtModule(artifacts, threads=threads)
        optimizer, fused = toc.OrtOptimizer(model), toc.OrtOptimizer(model, fused=True)
        optimizer.create_moments()
        fused.load_state_dict(optimizer.state_dict())
        numpy = x.numpy(), y.numpy()

        def their_gradients() -> None:
            module(*numpy)
            module.lazy_reset_grad()

        def their_step() -> None:
            module(*numpy)
            their_optimizer.step()
            module.lazy_reset_grad()

        def our_gradients() -> None:
            model.train_step(x, y)
            model.lazy_reset_grad()

        def our_autograd() -> None:
            model(x, y).backward()
            optimizer.zero_grad()

        def with_autograd(chosen: Any) -> Callable[[], None]:
            def step() -> None:
                model(x, y).backward()
                chosen.step()
                chosen.zero_grad()

            return step

        def without(chosen: Any) -> Callable[[], None]:
            def step() -> None:
                model.train_step(x, y)
                chosen.step()
                model.lazy_reset_grad()

            return step

        base, gradients = ratios({"train_step": our_gradients, "autograd": our_autograd}, their_gradients, rounds, budget)
        model.train_step(x, y)
        module(*numpy)
        steps, updates = ratios({"graph": optimizer.step, "fused": fused.step}, their_optimizer.step, rounds, budget)
        whole = {
            "autograd, graph": with_autograd(optimizer),
            "train_step, graph": without(optimizer),
            "autograd, fused": with_autograd(fused),
            "train_step, fused": without(fused),
        }
        total, complete = ratios(whole, their_step, rounds, budget)
    return [base, *gradients.values(), steps, *updates.values(), total, *complete.values()]


def row(name: str, pairs: int, threads: int | None, rounds: int, budget: float) -> str:
    columns = zip(*(compare(name, threads, rounds, budget) for _ in range(pairs)), strict=True)
    medians = [statistics.median(column) for column in columns]
    return "| " + " | ".join([name, *(f"{value:.0f}" if value >= 30 else f"{value:.2f}" for value in medians)]) + " |"


def compare_fused(millions: int, rounds: int, budget: float) -> str:
    """`fused=True` against `torch.optim.AdamW(fused=True)` on a wide linear layer."""
    width = 1000
    with tempfile.TemporaryDirectory() as folder:
        module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(millions)))
        x = torch.randn(2, width)
        artifacts = toc.export_artifacts(module, (x,), Path(folder), loss="mse", exporter="torchscript")
        model = toc.OrtModule(artifacts)
        model.train_step(x, torch.randn(2, width))
        fused = toc.OrtOptimizer(model, fused=True)
        plain = torch.optim.AdamW(model.named_trainable().values(), fused=True)
        base, found = ratios({"ours": fused.step}, plain.step, rounds, budget)
    return f"| {millions}M | {base:.0f} | {found['ours']:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of models, each made anew")
    parser.add_argument("--budget", type=float, default=0.15, help="seconds per side and round")
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--large", action="store_true", help="also the fused optimizer at 5 and 50 million parameters")
    options = parser.parse_args()
    print(
        "| model | official fwd+bwd us | train_step | autograd | official opt us | graph | fused | official step us | autograd, graph ",
        end="",
    )
    print("| train_step, graph | autograd, fused | train_step, fused |\n|" + "---|" * 12)
    for name in options.only.split(","):
        if name:
            print(row(name, options.pairs, options.threads, options.rounds, options.budget), flush=True)
    if options.large:
        print("\n| parameters | torch.optim.AdamW(fused=True) us | OrtOptimizer(fused=True) |\n|---|---|---|")
        for millions in (5, 50):
            print(compare_fused(millions, options.rounds, options.budget), flush=True)


if __name__ == "__main__":
    main()
