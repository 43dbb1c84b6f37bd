"""Small modules of every kind the runtime must train, with the inputs they take."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc

CLASSES = 5


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.pool, self.fc = nn.MaxPool2d(2), nn.Linear(8 * 4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm1(self.conv1(x))))
        return self.fc(self.pool(torch.relu(self.norm2(self.conv2(x)))).flatten(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.encoder(self.embedding(x)).mean(1))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.lstm(x)[0][:, -1])


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(20, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.embedding(x).sum(1))


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.dropout, self.fc2 = nn.Linear(12, 64), nn.Dropout(0.5), nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.dropout(torch.relu(self.fc1(x))))


class GroupNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Linear(8 * 16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.gelu(self.norm(self.conv(x))).flatten(1))


class LayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.norm(self.fc1(x)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embedding(x).mean(1)))


MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...], bool]] = {
    "mlp": (MLP, (12,), True),
    "cnn": (CNN, (3, 8, 8), True),
    "transformer": (Transformer, (7,), False),
    "lstm": (LSTM, (5, 6), True),
    "embedding": (Embedding, (7,), False),
    "dropout": (Dropout, (12,), True),
    "groupnorm": (GroupNorm, (3, 4, 4), True),
    "layernorm": (LayerNorm, (12,), True),
    "tied": (Tied, (7,), False),
}


def module(name: str) -> nn.Module:
    """Always the same initial weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name][0]().train()


def batch(name: str, size: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """An input and labels."""
    _, shape, floating = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, *shape, generator=generator) if floating else torch.randint(0, 20, (size, *shape), generator=generator)
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


_KEEP = tempfile.TemporaryDirectory(prefix="toc-exported-")


def exported(name: str, exporter: str = "auto", **options: Any) -> toc.Artifacts:
    """Artifacts of one of the modules; made once per test run."""
    return _exported(name, exporter, **options)


@functools.cache
def _exported(name: str, exporter: str, **options: Any) -> toc.Artifacts:
    parts = [name, exporter, *(f"{key}-{value}" for key, value in options.items())]
    folder = Path(_KEEP.name) / "_".join(str(part).replace("/", "_") for part in parts)[:100]
    return toc.export_artifacts(module(name), (batch(name)[0],), folder, exporter=exporter, **options)


def in_ort_format(name: str, place: Path) -> Path:
    """The artifacts of one of the modules in ONNX Runtime's own format, in the folder `place`."""
    folder = exported(name).folder
    with tempfile.TemporaryDirectory() as work:
        for model in ("training_model", "eval_model", "optimizer_model"):
            shutil.copy(folder / f"{model}.onnx", work)
            command = [sys.executable, "-m", "onnxruntime.tools.convert_onnx_models_to_ort", str(Path(work, f"{model}.onnx"))]
            subprocess.run([*command, "--optimization_style", "Fixed"], check=True, capture_output=True)
            shutil.copy(Path(work, f"{model}.ort"), place)
    shutil.copy(folder / "checkpoint", place)
    return place


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module with running statistics after one step of AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.rand(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer
