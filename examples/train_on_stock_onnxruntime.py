"""Train with the stock onnxruntime, which only infers: the whole training step is one graph of standard operators.

Exports a small classifier, trains it with `onnxruntime.InferenceSession`, saves the state, and goes on in PyTorch.

python examples/train_on_stock_onnxruntime.py [--steps 50]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 16, generator=generator)
    labels = [torch.randint(0, 4, (32,), generator=generator) for _ in range(steps)]
    return [(centres[y] + torch.randn(32, 16, generator=generator), y) for y in labels]


def train(folder: Path, data: list[tuple[torch.Tensor, torch.Tensor]], lr: float) -> list[float]:
    """The loop that any language would write: feed each result `X.new` back as `X`."""
    session = onnxruntime.InferenceSession(str(folder / "step_model.onnx"), providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    state = load_file(folder / "state.safetensors")
    losses = []
    for step, (x, y) in enumerate(data, 1):
        feeds = {**state, "input": x.numpy(), "labels": y.numpy(), "lr": np.array(lr, np.float32), "step": np.array(step)}
        results = dict(zip(outputs, session.run(None, feeds), strict=True))
        state = {name: results[f"{name}.new"] for name in state}
        losses.append(float(results["loss"]))
    with safe_open(folder / "state.safetensors", "numpy") as file:
        metadata = file.metadata()
    metadata |= {"torch_ort_ckpt.step": str(len(data)), "torch_ort_ckpt.lr": repr(lr)}
    save_file(state, folder / "trained.safetensors", metadata)
    return losses


def main(steps: int = 50) -> tuple[list[float], float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    data = batches(2 * steps)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts = toc.export_artifacts(net, (data[0][0],), folder / "artifacts", loss="cross_entropy", optimizer="adamw")
        toc.export_step_model(artifacts, folder)
        losses = train(folder, data[:steps], lr=0.01)
        print(f"onnxruntime {onnxruntime.__version__}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {steps} steps")

        state = toc.load(folder / "trained.safetensors")
    net.load_state_dict(toc.to_state_dict(state))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    optimizer.load_state_dict(toc.to_optimizer_state_dict(state, optimizer, module=net))
    for x, y in data[steps:]:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"PyTorch went on from there: loss {loss.item():.4f}")
    return losses, loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    main(parser.parse_args().steps)
