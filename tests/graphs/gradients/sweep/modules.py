"""The layers of `torch.nn`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .case import Case, curved, layer

ACTIVATIONS: list[tuple[str, Callable[[], nn.Module]]] = [
    (name, getattr(nn, name))
    for name in (
        "ELU", "Hardshrink", "Hardsigmoid", "Hardtanh", "Hardswish", "LeakyReLU", "LogSigmoid", "PReLU", "ReLU", "ReLU6", "SELU", "CELU",
        "GELU", "Sigmoid", "SiLU", "Mish", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Softmax2d",
    )
] + [
    ("GELU tanh", lambda: nn.GELU("tanh")),
    ("Threshold", lambda: nn.Threshold(0.1, 20)),
    ("GLU", lambda: nn.GLU(1)),
    ("Softmin", lambda: nn.Softmin(1)),
    ("Softmax", lambda: nn.Softmax(1)),
    ("LogSoftmax", lambda: nn.LogSoftmax(1)),
    ("PReLU by channel", lambda: nn.PReLU(4)),
    ("RReLU eval", lambda: nn.RReLU().eval()),
]  # fmt: skip

NORMS = [
    layer("BatchNorm1d", lambda: nn.BatchNorm1d(4), 4, 5, ordinary=True),
    layer("BatchNorm1d of vectors", lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)), 4),
    layer("BatchNorm2d", lambda: nn.BatchNorm2d(4), 4, 5, 3),
    layer("BatchNorm2d without statistics", lambda: nn.BatchNorm2d(4, track_running_stats=False), 4, 5, 3),
    layer("BatchNorm2d without weights", lambda: nn.BatchNorm2d(4, affine=False), 4, 5, 3),
    layer("BatchNorm2d eval", lambda: nn.BatchNorm2d(4).eval(), 4, 5, 3),
    layer("BatchNorm3d momentum None", lambda: nn.BatchNorm3d(4, momentum=None), 4, 5, 3, 2),
    layer("LayerNorm", lambda: nn.LayerNorm(6), 3, 6),
    layer("LayerNorm over two axes", lambda: nn.LayerNorm([3, 6]), 3, 6),
    layer("LayerNorm without weights", lambda: nn.LayerNorm(6, elementwise_affine=False), 3, 6),
    layer("RMSNorm", lambda: nn.RMSNorm(6), 3, 6),
    layer("GroupNorm", lambda: nn.GroupNorm(2, 6), 6, 4, 3),
    layer("InstanceNorm1d", lambda: nn.InstanceNorm1d(4, affine=True), 4, 6),
    layer("InstanceNorm2d", lambda: nn.InstanceNorm2d(4, affine=True), 4, 6, 5),
    layer("InstanceNorm2d with statistics", lambda: nn.InstanceNorm2d(4, track_running_stats=True), 4, 6, 5),
    layer("InstanceNorm3d", lambda: nn.InstanceNorm3d(4), 4, 6, 5, 3),
    layer("LocalResponseNorm", lambda: nn.LocalResponseNorm(3), 6, 4, 4),
    layer("weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), 6),
    layer("weight_norm conv", lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 3)), 3, 8),
    layer("spectral_norm eval", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)).eval(), 6),
    layer("spectral_norm", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), 6),
]

POOLS = [
    layer("MaxPool1d", lambda: nn.MaxPool1d(3, 2, 1), 3, 10),
    layer("MaxPool2d", lambda: nn.MaxPool2d(2), 3, 8, 6, ordinary=True),
    layer("MaxPool2d dilated", lambda: nn.MaxPool2d(2, 2, 1, 2), 3, 9, 7),
    layer("MaxPool2d ceil", lambda: nn.MaxPool2d(3, 2, ceil_mode=True), 3, 8, 6),
    layer("MaxPool3d", lambda: nn.MaxPool3d(2, 1), 3, 5, 6, 4),
    layer("AvgPool1d", lambda: nn.AvgPool1d(3, 2, 1), 3, 10),
    layer("AvgPool2d", lambda: nn.AvgPool2d(2), 3, 8, 6),
    layer("AvgPool2d padded", lambda: nn.AvgPool2d(3, 2, 1), 3, 9, 7),
    layer("AvgPool2d not counting pads", lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), 3, 9, 7),
    layer("AvgPool2d divisor", lambda: nn.AvgPool2d(3, 2, 1, divisor_override=4), 3, 9, 7, ordinary=True),
    layer("AvgPool2d ceil", lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True), 3, 8, 6),
    layer("AvgPool2d ceil not counting pads", lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), 3, 8, 6),
    layer("AvgPool2d ceil divisor", lambda: nn.AvgPool2d(3, 2, ceil_mode=True, divisor_override=5), 3, 8, 6),
    layer("AvgPool3d", lambda: nn.AvgPool3d(3, 2, 1), 3, 5, 6, 7),
    layer("AvgPool3d ceil", lambda: nn.AvgPool3d(3, 2, 1, ceil_mode=True), 3, 5, 6, 8),
    layer("LPPool1d", lambda: nn.LPPool1d(2, 3), 3, 9, kind="positive"),
    layer("LPPool2d", lambda: nn.LPPool2d(2, 3), 3, 9, 7, kind="positive"),
    layer("FractionalMaxPool2d", lambda: nn.FractionalMaxPool2d(2, 3, _random_samples=torch.full([9, 3, 2], 0.4)), 3, 9, 7),
    layer("AdaptiveMaxPool1d", lambda: nn.AdaptiveMaxPool1d(3), 3, 10),
    layer("AdaptiveMaxPool2d dividing", lambda: nn.AdaptiveMaxPool2d((3, 2)), 3, 9, 8),
    layer("AdaptiveMaxPool2d", lambda: nn.AdaptiveMaxPool2d((4, 3)), 3, 9, 8),
    layer("AdaptiveMaxPool2d to 1", lambda: nn.AdaptiveMaxPool2d(1), 3, 9, 8),
    layer("AdaptiveMaxPool3d", lambda: nn.AdaptiveMaxPool3d((4, 3, 2)), 3, 9, 8, 5),
    layer("AdaptiveAvgPool1d", lambda: nn.AdaptiveAvgPool1d(3), 3, 10),
    layer("AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d((4, 3)), 3, 9, 8),
    layer("AdaptiveAvgPool2d dividing", lambda: nn.AdaptiveAvgPool2d((3, 4)), 3, 9, 8),
    layer("AdaptiveAvgPool2d to 1", lambda: nn.AdaptiveAvgPool2d(1), 3, 9, 8),
    layer("AdaptiveAvgPool3d", lambda: nn.AdaptiveAvgPool3d((4, 3, 2)), 3, 9, 8, 5),
]


class Unpool(nn.Module):
    def __init__(self, axes: int) -> None:
        super().__init__()
        self.pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[axes - 1](2, return_indices=True)
        self.unpool = (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)[axes - 1](2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unpool(*self.pool(x))


POOLS += [layer(f"MaxUnpool{axes}d", partial(Unpool, axes), 2, *(6, 4, 8)[:axes]) for axes in (1, 2, 3)]


def _pad(kind: str, axes: int) -> tuple[Any, ...]:
    widths = (1, 2, 2, 1, 1, 1)[: 2 * axes]
    return (widths, 1.5) if kind == "Constant" else (widths,)


PADS = [
    layer(f"{kind}Pad{axes}d", partial(getattr(nn, f"{kind}Pad{axes}d"), *_pad(kind, axes)), 2, *(4, 5, 6)[:axes])
    for kind in ("Constant", "Zero", "Reflection", "Replication", "Circular")
    for axes in (1, 2, 3)
]
PADS += [layer("negative pad", lambda: nn.ConstantPad2d((-1, 2, 1, -2), 0.5), 2, 6, 5, ordinary=True)]


CONVOLVED: dict[str, dict[str, Any]] = {
    "": {"padding": 1},
    "strided": {"stride": 2, "padding": 1},
    "dilated": {"dilation": 2},
    "grouped": {"groups": 2, "padding": 1, "stride": 2},
    "depthwise": {"groups": 4, "padding": 1},
    "reflecting": {"padding": 1, "padding_mode": "reflect"},
    "same": {"padding": "same"},
}
CONVOLUTIONS = []
for axes in (1, 2, 3):
    size = (9, 8, 7)[:axes]
    for kind, options in CONVOLVED.items():
        CONVOLUTIONS.append(
            layer(
                f"Conv{axes}d {kind}".strip(),
                partial(getattr(nn, f"Conv{axes}d"), 4, 8, 3, **options),
                4,
                *size,
                ordinary=(axes, kind) == (2, "grouped"),
            )
        )
    for kind, options in {
        "": {},
        "strided": {"stride": 2, "padding": 1, "output_padding": 1},
        "dilated": {"dilation": 2},
        "grouped": {"groups": 2, "stride": 2},
    }.items():
        CONVOLUTIONS.append(
            layer(
                f"ConvTranspose{axes}d {kind}".strip(),
                partial(getattr(nn, f"ConvTranspose{axes}d"), 4, 6, 3, **options),
                4,
                *(4, 3, 5)[:axes],
            )
        )
CONVOLUTIONS += [
    layer("Conv2d large kernel", lambda: nn.Conv2d(3, 4, 9, 2, 4), 3, 16, 16),
    layer("Conv2d 1x1", lambda: nn.Conv2d(3, 4, 1), 3, 6, 6),
    layer("Unfold", lambda: nn.Unfold(3, padding=1, stride=2), 3, 8, 7),
    layer("Fold", lambda: nn.Fold((6, 5), 2), 3 * 4, 20),
]


def _resizes(mode: str, axes: int) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = [{"scale_factor": 2.0}, {"size": (7, 3, 6)[:axes]}]
    return plain if mode == "nearest" else [*plain, {"scale_factor": 2.0, "align_corners": True}]


RESIZES = [
    layer(f"Upsample {mode} {axes}d {how}", partial(nn.Upsample, mode=mode, **how), 2, *(4, 5, 3)[:axes])
    for mode, ranks in {"nearest": (1, 2, 3), "linear": (1,), "bilinear": (2,), "bicubic": (2,), "trilinear": (3,)}.items()
    for axes in ranks
    for how in _resizes(mode, axes)
]
RESIZES += [
    layer("interpolate area", lambda: lambda x: F.interpolate(x, size=(3, 2), mode="area"), 2, 7, 5),
    layer("interpolate nearest-exact", lambda: lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"), 2, 6, 4),
    layer("interpolate antialias", lambda: lambda x: F.interpolate(x, size=(3, 4), mode="bilinear", antialias=True), 2, 7, 5),
    layer("PixelShuffle", lambda: nn.PixelShuffle(2), 8, 3, 4),
    layer("PixelUnshuffle", lambda: nn.PixelUnshuffle(2), 2, 6, 4),
    layer("ChannelShuffle", lambda: nn.ChannelShuffle(2), 4, 3, 2),
]


def _table(make: Callable[[], nn.Module], *indices: Callable[[int], torch.Tensor]) -> Case:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = make()

        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            return curved(self.table(*values))

    return Case("", Looked, lambda batch: tuple(index(batch) for index in indices))


def _named(name: str, case: Case) -> Case:
    return Case(name, case.module, case.inputs, case.ordinary, case.axes)


def _two_dimensional(batch: int) -> torch.Tensor:
    return torch.randint(0, 10, (batch, 5))


EMBEDDINGS = [
    _named("Embedding", _table(lambda: nn.Embedding(10, 4), _two_dimensional)),
    _named("Embedding padding_idx", _table(lambda: nn.Embedding(10, 4, padding_idx=3), _two_dimensional)),
    _named("Embedding by frequency", _table(lambda: nn.Embedding(10, 4, scale_grad_by_freq=True), _two_dimensional)),
    _named("EmbeddingBag sum", _table(lambda: nn.EmbeddingBag(10, 4, mode="sum"), _two_dimensional)),
    _named("EmbeddingBag mean", _table(lambda: nn.EmbeddingBag(10, 4, mode="mean"), _two_dimensional)),
    _named("EmbeddingBag max", _table(lambda: nn.EmbeddingBag(10, 4, mode="max"), _two_dimensional)),
    _named("EmbeddingBag padding_idx", _table(lambda: nn.EmbeddingBag(10, 4, padding_idx=3), _two_dimensional)),
    _named(
        "EmbeddingBag offsets",
        _table(lambda: nn.EmbeddingBag(10, 4), lambda batch: torch.randint(0, 10, (12,)), lambda batch: torch.arange(0, 2 * batch, 2)),
    ),
]

RECURRENT = [
    layer("RNN", lambda: nn.RNN(3, 4, batch_first=True), 5, 3),
    layer("RNN relu", lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True), 5, 3),
    layer("LSTM", lambda: nn.LSTM(3, 4, batch_first=True), 5, 3),
    layer("LSTM stacked bidirectional", lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True), 4, 3),
    layer("LSTM projected", lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True), 4, 3),
    layer("GRU", lambda: nn.GRU(3, 4, batch_first=True), 5, 3),
    layer("GRU stacked bidirectional", lambda: nn.GRU(3, 4, 2, bidirectional=True, batch_first=True), 4, 3),
    layer("LSTMCell", lambda: nn.LSTMCell(3, 4), 3),
    layer("GRUCell", lambda: nn.GRUCell(3, 4), 3),
    layer("RNNCell", lambda: nn.RNNCell(3, 4), 3),
]


class Twice(nn.Module):
    """A layer of two inputs, the second made of the first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x * 2)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


OTHERS = [
    layer("Linear", lambda: nn.Linear(5, 3), 4, 5),
    layer("Bilinear", lambda: Twice(nn.Bilinear(5, 5, 3)), 5),
    layer("MultiheadAttention", SelfAttention, 5, 8),
    layer("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 5, 8),
    layer("TransformerDecoderLayer", lambda: Twice(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)), 5, 8),
    layer("CosineSimilarity", lambda: lambda x: F.cosine_similarity(x, x.flip(-1), -1), 4, 6),
    layer("PairwiseDistance", lambda: lambda x: F.pairwise_distance(x, x.flip(-1)), 6),
    layer("Flatten, Unflatten", lambda: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (3, 4))), 2, 6),
]


MODULES = [
    *(layer(name, make, 4, 3, 2, ordinary=name in ("GELU", "Mish")) for name, make in ACTIVATIONS),
    *NORMS, *POOLS, *PADS, *CONVOLUTIONS, *RESIZES, *EMBEDDINGS, *RECURRENT, *OTHERS,
]  # fmt: skip
