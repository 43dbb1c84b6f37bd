"""A training step (forward, backward, update) of the torch engine, as ratios (below 1 is faster), interleaved in one process.

    python -m benchmarks.torch_engine [--threads N] [--only mlp,cnn,transformer,many] [--rounds N] [--no-compile]

Against the PyTorch module that the artifacts were exported from (AdamW on the fused kernel), eager with eager and compiled with compiled,
and against `onnxruntime.training.api`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torch_ort_ckpt as toc
from benchmarks.runtime import MODELS, official, ratios
from benchmarks.timing import table


def native_step(module: nn.Module, x: torch.Tensor, y: torch.Tensor, compiled: bool) -> Callable[[], Any]:
    run: Any = torch.compile(module) if compiled else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> Any:
        loss = nn.functional.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def our_step(artifacts: toc.Artifacts, x: torch.Tensor, y: torch.Tensor, compiled: bool, autograd: bool = True) -> Callable[[], Any]:
    model = toc.OrtModule(artifacts, engine="torch", compile=compiled)
    optimizer = toc.OrtOptimizer(model, lr=1e-4)

    def step() -> Any:
        loss = model(x, y) if autograd else model.train_step(x, y)
        if autograd:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def official_step(artifacts: toc.Artifacts, x: torch.Tensor, y: torch.Tensor, threads: int | None) -> Callable[[], Any]:
    module, optimizer = official(artifacts, threads)
    module.train()
    arrays = x.numpy(), y.numpy()

    def step() -> Any:
        loss = module(*arrays)
        optimizer.step()
        module.lazy_reset_grad()
        return loss

    return step


def compare(name: str, threads: int | None, rounds: int, compiled: bool) -> list[str]:
    make, sample = MODELS[name]
    torch.manual_seed(0)
    x = sample()
    y = torch.randint(0, 10, (len(x),))
    with tempfile.TemporaryDirectory() as folder:
        module = make().train()
        artifacts = toc.export_artifacts(module, (x,), folder, exporter="torchscript")
        contenders = {"eager": our_step(artifacts, x, y, False), "official": official_step(artifacts, x, y, threads)}
        if compiled:
            contenders |= {"native compiled": native_step(make().train(), x, y, True), "compiled": our_step(artifacts, x, y, True)}
            contenders["train_step"] = our_step(artifacts, x, y, True, autograd=False)
        base, found = ratios(contenders, native_step(make().train(), x, y, False), rounds, 0.2)
    row = [name, f"{base:.0f} us", f"{found['eager']:.2f}", f"{found['eager'] / found['official']:.2f}"]
    if compiled:
        row += [f"{found['compiled'] / found['native compiled']:.2f}", f"{found['compiled'] / found['official']:.2f}"]
        row.append(f"{found['train_step'] / found['official']:.2f}")
    return row


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--threads", type=int, help="threads of torch and of ORT")
    options.add_argument("--only", default=",".join(MODELS), help="models, comma-separated")
    options.add_argument("--rounds", type=int, default=11)
    options.add_argument("--no-compile", action="store_true")
    chosen = options.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    header = ["model", "native PyTorch", "eager / native", "eager / official ORT"]
    if not chosen.no_compile:
        header += ["compiled / native compiled", "compiled / official ORT", "compiled train_step / official ORT"]
    print(table("A training step on the torch engine", header, []), flush=True)
    for name in chosen.only.split(","):
        print("| " + " | ".join(compare(name, chosen.threads, chosen.rounds, not chosen.no_compile)) + " |", flush=True)


if __name__ == "__main__":
    main()
