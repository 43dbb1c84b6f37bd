"""The same artifacts on PyTorch alone: the torch engine, eager and through torch.compile, against ONNX Runtime; then the source as Python.

python examples/torch_engine_compile.py            (compiling needs a C++ compiler: `torch-ort-ckpt doctor` tells)
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import torch_ort_ckpt as toc


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))


def train(folder: Path, steps: int, **engine: object) -> list[float]:
    model = toc.OrtModule(folder, **engine)  # type: ignore[arg-type]  # engine and compile, passed on
    optimizer = toc.OrtOptimizer(model, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 16, generator=generator)
        loss = model(x, x[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(folder: Path, steps: int = 30, compile: bool = True) -> dict[str, list[float]]:
    toc.export_artifacts(network(), (torch.randn(2, 16),), folder)
    losses = {"ort": train(folder, steps, engine="ort"), "torch": train(folder, steps, engine="torch")}
    if compile:
        losses["torch, compiled"] = train(folder, steps, engine="torch", compile=True)
    for name, values in losses.items():
        gap = max(abs(a - b) for a, b in zip(values, losses["ort"], strict=True))
        print(f"{name:16s} loss {values[0]:.4f} -> {values[-1]:.4f}, largest difference from ORT {gap:.1e}")

    toc.to_torch_module(folder, source=folder / "model.py")  # leaving ORT for good: a module that imports only torch
    lines = (folder / "model.py").read_text().splitlines()
    print(f"model.py: {len(lines)} lines, imports {[line for line in lines if line.startswith(('import', 'from'))]}")
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place))
