"""The main job on built-in data, behind `torch-ort-ckpt demo`: export, train with ORT, convert to PyTorch and back, train on."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.bridge import from_torch, to_optimizer_state_dict, to_state_dict
from ..errors import CheckpointError, MissingDependencyError
from ..formats import load, save
from ..graphs.export import export_artifacts
from ..operations.convert import convert
from ..operations.diff import diff

STEPS = 8
RESULTS = ("trained", "model.safetensors", "model.pt", "back", "trained_on", "from_pytorch", "final")
"""What the demo writes next to the artifacts."""


@dataclass(frozen=True)
class Row:
    """One thing the demo did: what, with which program, where the result is and what it shows."""

    what: str
    who: str
    where: str
    shows: str


def demo(folder: Path, overwrite: bool = False) -> Iterator[Row]:
    """Run the demo; returns a row for each stage. All files are kept in `folder`."""
    if not overwrite and (found := [name for name in RESULTS if (folder / name).exists()]):
        raise CheckpointError(
            f"holds {', '.join(found)} already", path=folder, remedy="Pass --overwrite to replace the files, or choose another folder."
        )
    if importlib.util.find_spec("onnxruntime") is None:
        raise MissingDependencyError(
            "the demo trains with ONNX Runtime, which is not installed",
            remedy='pip install "torch-ort-ckpt[ort]" (Python 3.12 or older). `torch-ort-ckpt doctor` shows what works here.',
        )
    model = network()
    inputs, labels = data()
    adamw = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    artifacts = export_artifacts(model, inputs, folder, loss="cross_entropy", optimizer=adamw, overwrite=overwrite)
    yield Row(
        "export a small network", "PyTorch -> ORT", "training_model.onnx ...", f"{sum(p.numel() for p in model.parameters())} parameters"
    )

    losses = train_with_ort(folder, folder / "checkpoint", folder / "trained", inputs, labels)
    yield Row(f"train {STEPS} steps", "ONNX Runtime", "trained", f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")

    state = load(folder / "trained")
    yield Row("read ORT's checkpoint", "torch_ort_ckpt", "trained", repr(state).removeprefix("CheckpointState(").removesuffix(")"))

    for name in ("model.safetensors", "model.pt", "back"):
        convert(folder / ("model.safetensors" if name == "back" else "trained"), folder / name, overwrite=True)
    equal = all(diff(state, folder / name).equal for name in ("model.safetensors", "model.pt", "back"))
    yield Row(
        "convert and back", "torch_ort_ckpt", "model.safetensors, model.pt, back", "all equal bit for bit" if equal else "THEY DIFFER"
    )

    model.load_state_dict(to_state_dict(state))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    optimizer.load_state_dict(to_optimizer_state_dict(state, optimizer, module=model, artifacts=artifacts))
    here = [torch_step(model, optimizer, inputs, labels) for _ in range(STEPS)]
    yield Row(f"train {STEPS} more", "plain PyTorch", "in memory", f"loss {here[0]:.4f} -> {here[-1]:.4f}")

    there = train_with_ort(folder, folder / "trained", folder / "trained_on", inputs, labels)
    gap = max(abs(a - b) for a, b in zip(here, there, strict=True))
    yield Row("the same steps", "ONNX Runtime", "trained_on", f"loss {there[0]:.4f} -> {there[-1]:.4f}, largest gap {gap:.0e}")

    save(from_torch(model, optimizer, like=state), folder / "from_pytorch", format="ort")
    final = train_with_ort(folder, folder / "from_pytorch", folder / "final", inputs, labels)
    shows = f"loss {final[0]:.4f} -> {final[-1]:.4f}, step {load(folder / 'final').step}"
    yield Row(f"train PyTorch's result, {STEPS} steps", "ONNX Runtime", "from_pytorch -> final", shows)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Three arms of a spiral: 300 points of the plane in three classes."""
    generator = torch.Generator().manual_seed(1)
    radius = torch.linspace(0.05, 1, 100).repeat(3)
    labels = torch.arange(3).repeat_interleave(100)
    angle = radius * 4 + labels * (2 * math.pi / 3) + 0.1 * torch.randn(300, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels


def torch_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
    optimizer.step()
    return float(loss.detach())


def train_with_ort(folder: Path, start: Path, end: Path, inputs: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """ORT's own training API, from one checkpoint to another."""
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    state = CheckpointState.load_checkpoint(str(start))
    model = Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    optimizer = Optimizer(str(folder / "optimizer_model.onnx"), model)
    model.train()
    losses: list[Any] = []
    for _ in range(STEPS):
        losses.append(model(inputs.numpy(), labels.numpy()))
        optimizer.step()
        model.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, str(end), include_optimizer_state=True)
    return [float(loss) for loss in losses]
