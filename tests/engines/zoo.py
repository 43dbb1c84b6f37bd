"""Small models of every family that the exporters handle, and their artifacts as ORT's own tools make them."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Family:
    """A model, an example input, and the targets its loss wants. With `loss` None the model computes the loss itself."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    loss: str | None = "cross_entropy"
    target: Callable[[], Tensor] | None = None
    dynamic: tuple[int, ...] = ()
    """Axes of the first input whose size is left open."""
    ort: bool = True
    """Whether ORT 1.19.2 can train it on the CPU; if not, only PyTorch itself is the oracle."""

    def batch(self, seed: int = 0) -> list[Tensor]:
        torch.manual_seed(seed)
        return [*self.inputs(), *([self.target()] if self.target is not None else [])]


def export(family: Family, folder: Path, *, dynamo: bool = False, artifacts: bool = True, seed: int = 1) -> nn.Module:
    """Write the model, and the four artifacts where ORT can make them, to `folder`; returns the module they were made from."""
    torch.manual_seed(seed)
    module = family.build().train()
    inputs = tuple(family.batch()[: len(family.inputs())])
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    path = folder / "model.onnx"
    names = [f"input{i}" for i in range(len(inputs))]
    settings: dict[str, Any] = {"input_names": names, "output_names": ["output"], "dynamo": dynamo}
    if family.dynamic:
        settings["dynamic_axes"] = {names[0]: {axis: f"size{axis}" for axis in family.dynamic}}
    if dynamo:
        settings |= {"opset_version": 18, "optimize": False, "external_data": False, "verbose": False}
    else:
        settings |= {"opset_version": 15, "do_constant_folding": False, "training": torch.onnx.TrainingMode.TRAINING}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(module, inputs, path, **settings)
    module.load_state_dict(kept)  # tracing in training mode moves BatchNorm's statistics
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name in kept:
            tensor.CopyFrom(onnx.numpy_helper.from_array(kept[tensor.name].numpy(), tensor.name))
    onnx.save(model, path)
    if artifacts and family.ort:
        _generate(family, model, module, folder)
    return module


def _generate(family: Family, model: onnx.ModelProto, module: nn.Module, folder: Path) -> None:
    from onnxruntime.training import artifacts

    model.ir_version = 8
    for node in model.graph.node:
        if node.op_type == "SoftmaxCrossEntropyLoss" and len(node.output) == 1:  # its gradient reads the second output
            node.output.append(f"{node.output[0]}_log_prob")
    weights = {tensor.name for tensor in model.graph.initializer}
    trainable = [name for name, _ in module.named_parameters() if name in weights]
    losses = {
        "cross_entropy": artifacts.LossType.CrossEntropyLoss,
        "mse": artifacts.LossType.MSELoss,
        "bce": artifacts.LossType.BCEWithLogitsLoss,
        "l1": artifacts.LossType.L1Loss,
        None: None,
    }
    artifacts.generate_artifacts(
        model,
        requires_grad=trainable,
        frozen_params=[name for name in module.state_dict() if name in weights and name not in trainable],
        loss=losses[family.loss],
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=str(folder),
    )
    evaluation = onnx.load(folder / "eval_model.onnx")
    for node in evaluation.graph.node:
        if node.op_type == "BatchNormalization":  # ORT refuses the outputs it has left from training
            del node.output[1:]
    onnx.save(evaluation, folder / "eval_model.onnx")
    optimizer = onnx.load(folder / "optimizer_model.onnx")
    optimizer.ir_version = 8  # onnx writes its own newest version, which ORT refuses
    onnx.save(optimizer, folder / "optimizer_model.onnx")


class Transformer(nn.Module):
    def __init__(self, layers: int = 2, width: int = 32, dropout: float = 0.0, activation: Any = "gelu") -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.position = nn.Parameter(torch.randn(1, 7, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, dropout, activation) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Block(nn.Module):
    """Attention written out, as exported models have it."""

    def __init__(self, width: int, dropout: float, activation: str) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout, self.activation = nn.Dropout(dropout), activation

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) / (width // 4) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = self.dropout(torch.softmax(scores.masked_fill(mask, -1e9), -1))
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        hidden = self.up(self.second(x))
        hidden = {"gelu": F.gelu, "tanh": lambda h: F.gelu(h, approximate="tanh"), "silu": F.silu}[self.activation](hidden)
        return x + self.dropout(self.down(hidden))


class Rotary(nn.Module):
    """Rotary position embeddings before attention, and an RMS norm."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(16))
        angles = torch.arange(6)[:, None] / 10000 ** (torch.arange(0, 16, 2) / 16)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def turn(self, x: Tensor) -> Tensor:
        a, b = x[..., :8], x[..., 8:]
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        weights = torch.softmax(self.turn(self.q(x)) @ self.turn(self.k(x)).transpose(1, 2) / 4.0, -1)
        return self.out(weights @ self.v(x)).mean(1)


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **settings: Any) -> None:
        super().__init__()
        self.rnn = kind(6, 8, **settings)
        self.head = nn.Linear(8 * (2 if settings.get("bidirectional") else 1), 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][-1])


class Shapes(nn.Module):
    """Reshaping with sizes computed from the input, slicing, padding, joining, tiling and comparing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.first(x.reshape(batch * length, width)).view(batch, length, -1)
        y = torch.cat([y[:, 1:], y[:, :1]], 1)
        y = F.pad(y, (0, 0, 1, 1))[:, 1:-1]
        y = torch.where(y > 0, y, y * 0.1) + y.clamp(-1, 1).expand(batch, length, -1)
        left, right = torch.split(y, 4, -1)
        y = torch.stack([left, right.abs().sqrt() if False else right * right], -1).flatten(2)
        y = y.transpose(1, 2).contiguous().view(batch, -1, length).mean(-1)
        return self.second(torch.cat([y, y.exp() / y.exp().sum(-1, keepdim=True)], 1))


class WeightedLoss(nn.Module):
    """A model that computes its own loss."""

    def __init__(self, reduction: str = "mean", **settings: Any) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)
        weight = torch.tensor([1.0, 2.0, 0.5, 1.5, 1.0]) if settings.pop("weighted", False) else None
        self.loss = settings.pop("kind", nn.CrossEntropyLoss)(weight=weight, reduction=reduction, **settings)
        self.log = isinstance(self.loss, nn.NLLLoss)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(x)
        return self.loss(F.log_softmax(scores, -1) if self.log else scores, labels).sum()


def image(size: int = 12) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(4, 3, size, size),)


def labels(count: int = 4) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 5, (count,))


def head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5)]


def vector() -> tuple[Tensor, ...]:
    return (torch.randn(4, 6),)


def sequence() -> tuple[Tensor, ...]:
    return (torch.randn(7, 4, 6),)


def _mlp(*activations: nn.Module) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(6, 8)]
        for activation in activations:
            layers += [activation, nn.Linear(8, 8)]
        return nn.Sequential(*layers, nn.Linear(8, 5))

    return build


def _convolve(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(3, 4, 3), *copy.deepcopy(layers), nn.ReLU(), *head(4))


FAMILIES: dict[str, Family] = {
    "mlp": Family(_mlp(nn.ReLU(), nn.Sigmoid(), nn.Tanh()), vector, target=labels()),
    "activations": Family(_mlp(nn.GELU(), nn.LeakyReLU(), nn.SiLU(), nn.Hardtanh()), vector, target=labels()),
    "smooth_activations": Family(_mlp(nn.Softplus(), nn.ELU(), nn.SELU(), nn.Hardswish(), nn.PReLU()), vector, target=labels(), ort=False),
    "mse": Family(_mlp(nn.ReLU()), vector, "mse", lambda: torch.randn(4, 5)),
    "l1": Family(_mlp(nn.ReLU()), vector, "l1", lambda: torch.randn(4, 5)),
    "bce": Family(_mlp(nn.ReLU()), vector, "bce", lambda: torch.rand(4, 5).round()),
    "weighted_loss": Family(lambda: WeightedLoss(weighted=True), lambda: (*vector(), labels()()), None),
    "ignore_index": Family(lambda: WeightedLoss(ignore_index=2), lambda: (*vector(), torch.tensor([0, 2, 4, 1])), None),
    "sum_loss": Family(lambda: WeightedLoss("sum", weighted=True), lambda: (*vector(), labels()()), None),
    "unreduced_loss": Family(lambda: WeightedLoss("none"), lambda: (*vector(), labels()()), None),
    "nll": Family(lambda: WeightedLoss(kind=nn.NLLLoss, weighted=True), lambda: (*vector(), labels()()), None),
    "cnn_bn": Family(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            *head(8),
        ),
        image(),
        target=labels(),
    ),
    "conv_variants": Family(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2, padding=(1, 2), bias=False),
            nn.Conv2d(6, 12, 3, groups=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(12, 6, 3, dilation=2, padding=2),
            *head(6),
        ),
        image(),
        target=labels(),
    ),
    "conv1d": Family(
        lambda: nn.Sequential(nn.Conv1d(6, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(72, 5)),
        lambda: (torch.randn(4, 6, 9),),
        target=labels(),
    ),
    "conv_transpose": Family(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2), nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), nn.ReLU(), *head(6)
        ),
        image(),
        target=labels(),
        ort=False,
    ),
    "max_pools": Family(_convolve(nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, 2, ceil_mode=True)), image(), target=labels()),
    "avg_pools": Family(_convolve(nn.AvgPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False)), image(), target=labels()),
    "avg_pool_ceil": Family(_convolve(nn.AvgPool2d(3, 2, 1, ceil_mode=True)), image(), target=labels(), ort=False),
    "upsample_nearest": Family(_convolve(nn.Upsample(scale_factor=2)), image(), target=labels(), ort=False),
    "upsample_bilinear": Family(_convolve(nn.Upsample(scale_factor=1.5, mode="bilinear")), image(), target=labels(), ort=False),
    "upsample_corners": Family(_convolve(nn.Upsample(size=17, mode="bilinear", align_corners=True)), image(), target=labels(), ort=False),
    "upsample_bicubic": Family(_convolve(nn.Upsample(scale_factor=2, mode="bicubic")), image(), target=labels(), ort=False),
    "padding_modes": Family(
        _convolve(nn.Conv2d(4, 4, 3, padding=2, padding_mode="reflect"), nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate")),
        image(),
        target=labels(),
        ort=False,
    ),
    "group_norm": Family(_convolve(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)), image(), target=labels(), ort=False),
    "transformer": Family(Transformer, lambda: (torch.randint(0, 50, (2, 7)),), target=lambda: torch.randint(0, 50, (14,))),
    "transformer_tanh_gelu": Family(
        lambda: Transformer(1, activation="tanh"), lambda: (torch.randint(0, 50, (2, 7)),), target=lambda: torch.randint(0, 50, (14,))
    ),
    "transformer_silu": Family(
        lambda: Transformer(1, activation="silu"), lambda: (torch.randint(0, 50, (2, 7)),), target=lambda: torch.randint(0, 50, (14,))
    ),
    "rotary": Family(Rotary, lambda: (torch.randn(3, 6, 16),), "mse", lambda: torch.randn(3, 16)),
    "lstm": Family(lambda: Recurrent(nn.LSTM), sequence, target=labels()),
    "bilstm": Family(lambda: Recurrent(nn.LSTM, bidirectional=True), sequence, target=labels(), ort=False),
    "rnn": Family(lambda: Recurrent(nn.RNN), sequence, target=labels(), ort=False),
    "stacked_gru": Family(lambda: Recurrent(nn.GRU, num_layers=2, bias=False), sequence, target=labels(), ort=False),
    "gru": Family(lambda: Recurrent(nn.GRU), sequence, target=labels()),
    "embedding": Family(
        lambda: nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(24, 5)), lambda: (torch.randint(0, 20, (4, 3)),), target=labels()
    ),
    "dropout_off": Family(_mlp(nn.Dropout(0.0)), vector, target=labels()),
    "shapes": Family(Shapes, lambda: (torch.randn(4, 3, 6),), target=labels()),
}
