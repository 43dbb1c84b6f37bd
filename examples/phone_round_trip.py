"""Train in ORT as a phone does, continue in plain PyTorch, return to ORT: one run, three stages, no step lost.

python examples/phone_round_trip.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from onnxruntime.training.api import CheckpointState, Module, Optimizer  # the API of the phone, in Python
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc

STEPS = 20


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))


def batches(start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(start)
    inputs = [torch.randn(32, 6, generator=generator) for _ in range(STEPS)]
    return [(x, x[:, :3].argmax(1)) for x in inputs]


def on_the_phone(folder: Path, source: str, target: str, start: int) -> list[float]:
    state = CheckpointState.load_checkpoint(str(folder / source))
    model = Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    optimizer = Optimizer(str(folder / "optimizer_model.onnx"), model)
    model.train()
    losses = []
    for x, y in batches(start):
        losses.append(float(model(x.numpy(), y.numpy())))
        optimizer.step()
        model.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, str(folder / target), include_optimizer_state=True)
    return losses


def in_pytorch(folder: Path, source: str, target: str, start: int) -> list[float]:
    state = toc.load(folder / source)
    model = network()
    model.load_state_dict(toc.to_state_dict(state))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    artifacts = toc.Artifacts.load(folder)  # the graph's hyper-parameters go along
    optimizer.load_state_dict(toc.to_optimizer_state_dict(state, optimizer, module=model, artifacts=artifacts))
    losses = []
    for x, y in batches(start):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    toc.save(toc.from_torch(model, optimizer, like=state), folder / target)
    return losses


def main(folder: Path) -> list[float]:
    toc.export_artifacts(network(), (torch.randn(2, 6),), folder, optimizer="adamw")
    losses = on_the_phone(folder, "checkpoint", "from_phone", 0)
    losses += in_pytorch(folder, "from_phone", "from_pytorch", 1)
    losses += on_the_phone(folder, "from_pytorch", "final", 2)
    for place, (name, where) in enumerate((("from_phone", "ORT"), ("from_pytorch", "PyTorch"), ("final", "ORT"))):
        part = losses[place * STEPS : (place + 1) * STEPS]
        print(f"{where:8s} loss {part[0]:.4f} -> {part[-1]:.4f}, now at step {toc.load(folder / name).step}")
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place))
