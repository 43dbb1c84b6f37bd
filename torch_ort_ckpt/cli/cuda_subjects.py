"""The models that `torch-ort-ckpt doctor --cuda` trains: five small ones of different kinds, and one with half-precision weights."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from onnx import TensorProto, helper
from torch import nn

from ..formats import load, save
from ..graphs.artifacts import Artifacts
from ..graphs.export import export_artifacts

_CLASSES, _WORDS = 5, 20


@dataclass(frozen=True)
class Subject:
    """A model with its artifacts. `build` makes the module they were exported from; `shape` is that of one sample."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: bool
    artifacts: Artifacts
    size: int = 8

    def module(self) -> nn.Module:
        """Always the same initial weights."""
        return _seeded(self.build)

    def batch(self, seed: int, device: torch.device) -> list[torch.Tensor]:
        """An input and its labels."""
        return [value.to(device) for value in _batch(self.shape, self.words, self.size, seed)]


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.lstm(x)[0][:, -1])
        return result


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.encoder(self.embedding(x)).mean(1))
        return result


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.out = nn.Embedding(_WORDS, 16), nn.LayerNorm(16), nn.Linear(16, _WORDS, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(torch.tanh(self.norm(self.embedding(x).mean(1))))
        return result


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, _CLASSES))


def _convolution() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(first, nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(), nn.Flatten(), nn.Linear(128, _CLASSES))


_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "perceptron": (_perceptron, (12,), False),
    "convolution": (_convolution, (3, 8, 8), False),
    "transformer": (_Attention, (7,), True),
    "lstm": (_Recurrent, (5, 6), False),
    "tied embedding": (_Tied, (7,), True),
}


def subjects(folder: Path, exporter: str = "auto") -> list[Subject]:
    """All models, exported below `folder`."""
    found = []
    for name, (build, shape, words) in _MODELS.items():
        example = _batch(shape, words, 4, 0)[0]
        artifacts = export_artifacts(_seeded(build), (example,), folder / name.replace(" ", "_"), exporter=exporter)
        found.append(Subject(name, build, shape, words, artifacts))
    return found


def with_half_weights(subject: Subject, dtype: torch.dtype, folder: Path) -> Subject:
    """The same model, whose graphs read the matrices through half-precision aliases (`<name>_fp16`, `<name>_bf16`)."""
    suffix, kind = ("_fp16", TensorProto.FLOAT16) if dtype == torch.float16 else ("_bf16", TensorProto.BFLOAT16)
    source = subject.artifacts.folder
    folder.mkdir(parents=True)
    state = load(source / "checkpoint", mmap=False)
    masters = {name: torch.as_tensor(value) for name, value in state.trainable.items() if value.ndim == 2}
    shutil.copy(source / "optimizer_model.onnx", folder)
    for name in ("training_model.onnx", "eval_model.onnx"):
        model = onnx.load(source / name)
        for value in model.graph.input:
            if value.name in masters:
                model.graph.node.insert(0, helper.make_node("Cast", [value.name + suffix], [value.name], to=TensorProto.FLOAT))
                value.name += suffix
                value.type.tensor_type.elem_type = kind
        onnx.save(model, folder / name)
    state.mixed_precision = {name: value.to(dtype) for name, value in masters.items()}
    save(state, folder / "checkpoint", include_mixed_precision=True, durable=False)
    return dataclasses.replace(subject, name=f"{subject.name} with{suffix.replace('_', ' ')} aliases", artifacts=Artifacts.load(folder))


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().train()


def _batch(shape: tuple[int, ...], words: bool, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, _WORDS, (size, *shape), generator=generator) if words else torch.randn(size, *shape, generator=generator)
    return x, torch.randint(0, _CLASSES, (size,), generator=generator)
