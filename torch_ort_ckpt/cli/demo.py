"""The main job on built-in data, behind `torch-ort-ckpt demo`: a LeNet-5 that learns digits, first in ONNX Runtime as an app would train
it, then in PyTorch, then in ONNX Runtime again."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..checkpoint.bridge import from_torch, to_optimizer_state_dict, to_state_dict
from ..checkpoint.state import format_bytes
from ..engines.ort.build import installed
from ..errors import CheckpointError, MissingDependencyError
from ..formats import load, save
from ..graphs.artifacts import Artifacts
from ..graphs.export import export_artifacts
from ..operations.convert import convert
from ..operations.diff import diff
from ..runtime.module import OrtModule
from ..runtime.optimizer import OrtOptimizer

STEPS, BATCH, RATE = 40, 64, 1e-3
RESULTS = ("trained", "model.safetensors", "model.pt", "back", "trained_on", "from_pytorch", "final")
"""What the demo writes next to the artifacts."""

_FONT = {  # 5 x 7 dots, a row a number
    0: (14, 17, 19, 21, 25, 17, 14),
    1: (4, 12, 4, 4, 4, 4, 14),
    2: (14, 17, 1, 2, 4, 8, 31),
    3: (31, 2, 4, 2, 1, 17, 14),
    4: (2, 6, 10, 18, 31, 2, 2),
    5: (31, 16, 30, 1, 1, 17, 14),
    6: (6, 8, 16, 30, 17, 17, 14),
    7: (31, 1, 2, 4, 8, 8, 8),
    8: (14, 17, 17, 14, 17, 17, 14),
    9: (14, 17, 17, 15, 1, 2, 12),
}


@dataclass(frozen=True)
class Stage:
    """One step of the story: what is done, by which program, why one would care, and the function that does it and says the outcome."""

    title: str
    who: str
    why: str
    run: Callable[[], str]


def demo(folder: Path, overwrite: bool = False) -> list[Stage]:
    """The stages in their order; each keeps its files in `folder`."""
    if not overwrite and (found := [name for name in RESULTS if (folder / name).exists()]):
        raise CheckpointError(
            f"holds {', '.join(found)} already", path=folder, remedy="Pass --overwrite to replace the files, or choose another folder."
        )
    if importlib.util.find_spec("onnxruntime") is None or not installed().trains:
        raise MissingDependencyError(
            "the demo trains with ONNX Runtime's training API, which is not installed",
            remedy='pip install "torch-ort-ckpt[ort]" (Python 3.12 or older). `torch-ort-ckpt doctor` shows what works here.',
        )
    story = _Story(folder, overwrite)
    return [
        Stage("Make training artifacts of LeNet-5", "PyTorch", "An app trains with these files. No onnxruntime is needed.", story.export),
        Stage(f"Train {STEPS} steps", "ONNX Runtime", "What an app does on the device; its checkpoint comes back to you.", story.train),
        Stage("Convert the checkpoint, and back", "torch_ort_ckpt", "Weights, moments and step are kept, bit for bit.", story.convert),
        Stage("Continue in plain PyTorch", "torch.optim.AdamW", "The optimizer goes on where the device stopped.", story.in_pytorch),
        Stage("The same steps in ONNX Runtime", "ONNX Runtime", "Both continue the same run: their losses agree.", story.in_ort),
        Stage("Train the artifacts in a PyTorch loop", "OrtModule", "Two changed lines in a loop you have.", story.as_module),
        Stage("Send PyTorch's result back", "ONNX Runtime", "The app trains on from what PyTorch learnt.", story.back),
    ]


class _Story:
    """What the stages hand on to one another."""

    def __init__(self, folder: Path, overwrite: bool) -> None:
        self.folder, self.overwrite = folder, overwrite
        self.model = network()
        self.pytorch: list[float] = []
        self.artifacts: Artifacts
        self.optimizer: torch.optim.Optimizer
        self.ort_seconds = 0.0

    def export(self) -> str:
        adamw = torch.optim.AdamW(self.model.parameters(), weight_decay=0.01)
        self.artifacts = export_artifacts(self.model, data(0)[0], self.folder, optimizer=adamw, overwrite=self.overwrite)
        files = [self.folder / name for name in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")]
        count = sum(p.numel() for p in self.model.parameters())
        return f"{count:,} parameters; {', '.join(file.name for file in files)}: {format_bytes(sum(f.stat().st_size for f in files))}"

    def train(self) -> str:
        losses = train_with_ort(self.folder, self.folder / "checkpoint", self.folder / "trained", range(STEPS))
        return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {self._right('trained')}"

    def convert(self) -> str:
        state = load(self.folder / "trained")
        for name in ("model.safetensors", "model.pt", "back"):
            source = "model.safetensors" if name == "back" else "trained"
            convert(self.folder / source, self.folder / name, overwrite=True)
        equal = all(diff(state, self.folder / name).equal for name in ("model.safetensors", "model.pt", "back"))
        size = format_bytes((self.folder / "trained").stat().st_size)
        return f"trained ({size}) -> model.safetensors, model.pt, back: " + ("all equal bit for bit" if equal else "THEY DIFFER")

    def in_pytorch(self) -> str:
        state = load(self.folder / "trained")
        self.model.load_state_dict(to_state_dict(state))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.01)
        self.optimizer.load_state_dict(to_optimizer_state_dict(state, self.optimizer, module=self.model, artifacts=self.artifacts))
        self.pytorch = [torch_step(self.model, self.optimizer, *data(seed)) for seed in range(STEPS, 2 * STEPS)]
        save(from_torch(self.model, self.optimizer, like=state), self.folder / "from_pytorch", format="ort")
        return f"loss {self.pytorch[0]:.3f} -> {self.pytorch[-1]:.3f}, {self._right('from_pytorch')}"

    def in_ort(self) -> str:
        started = time.perf_counter()
        losses = train_with_ort(self.folder, self.folder / "trained", self.folder / "trained_on", range(STEPS, 2 * STEPS))
        self.ort_seconds = time.perf_counter() - started
        gap = max(abs(a - b) for a, b in zip(losses, self.pytorch, strict=True))
        return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; largest difference to PyTorch {gap:.0e}"

    def as_module(self) -> str:
        started = time.perf_counter()
        model = OrtModule(self.artifacts)
        optimizer = OrtOptimizer(model, lr=RATE)
        model.load_checkpoint(self.folder / "trained", optimizer)
        losses = []
        for seed in range(STEPS, 2 * STEPS):
            loss = model(*data(seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        ratio = (time.perf_counter() - started) / self.ort_seconds
        theirs = load(self.folder / "trained_on").trainable
        same = all(torch.equal(value.detach(), theirs[name]) for name, value in model.named_trainable().items())
        shown = "equal bit for bit to ONNX Runtime's own" if same else "weights differ from ONNX Runtime's in the last bits"
        return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {shown}; {ratio:.1f} of its time"

    def back(self) -> str:
        losses = train_with_ort(self.folder, self.folder / "from_pytorch", self.folder / "final", range(2 * STEPS, 3 * STEPS))
        return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {self._right('final')}, step {load(self.folder / 'final').step}"

    def _right(self, name: str) -> str:
        """How many of 500 digits that were not trained on the checkpoint reads right."""
        model = network()
        model.load_state_dict(to_state_dict(load(self.folder / name)))
        images, labels = data(10_000, 500)
        with torch.no_grad():
            return f"{float((model(images).argmax(1) == labels).float().mean()):.0%} of new digits right"


def network() -> nn.Module:
    """LeNet-5, with ReLU and max pooling."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def data(seed: int = 0, count: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits of 28 x 28 pixels in random places and strengths, with noise, and what they show."""
    generator = torch.Generator().manual_seed(seed)
    dots = torch.tensor([[[row >> (4 - column) & 1 for column in range(5)] for row in _FONT[digit]] for digit in range(10)]).float()
    large = F.interpolate(dots[:, None], scale_factor=3)  # 21 x 15
    labels = torch.randint(0, 10, (count,), generator=generator)
    images = torch.zeros(count, 1, 28, 28)
    for image, label in zip(images, labels, strict=True):
        top, left = (int(torch.randint(0, room, (), generator=generator)) for room in (8, 14))
        image[:, top : top + 21, left : left + 15] = large[label]
    strength = 0.5 + torch.rand(count, 1, 1, 1, generator=generator)
    return images * strength + 0.2 * torch.randn(images.shape, generator=generator), labels


def torch_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    loss = F.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
    optimizer.step()
    return float(loss.detach())


def train_with_ort(folder: Path, start: Path, end: Path, seeds: range) -> list[float]:
    """ORT's own training API, from one checkpoint to another."""
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    state = CheckpointState.load_checkpoint(str(start))
    model = Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    optimizer = Optimizer(str(folder / "optimizer_model.onnx"), model)
    model.train()
    losses: list[Any] = []
    for seed in seeds:
        inputs, labels = data(seed)
        losses.append(model(inputs.numpy(), labels.numpy()))
        optimizer.step()
        model.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, str(end), include_optimizer_state=True)
    return [float(loss) for loss in losses]
