"""Vision as people write it for phones: small convolutional networks with the layers that mobile runtimes like."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .entry import CLASSES, Entry, classes, features, values


def unit(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Convolution, BatchNorm, activation."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), act())


class Head(nn.Module):
    """Global average pool and a classifier."""

    def __init__(self, body: nn.Module, channels: int) -> None:
        super().__init__()
        self.body, self.fc = body, nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x).mean((2, 3)))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, gate: type[nn.Module] = nn.Hardsigmoid) -> None:
        super().__init__()
        self.pool, self.down, self.up, self.gate = nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1), gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(self.up(F.relu(self.down(self.pool(x)))))


class InvertedResidual(nn.Module):
    """MobileNet's block: expand, depthwise, squeeze and excite, project."""

    def __init__(self, inputs: int, outputs: int, stride: int, act: type[nn.Module], gate: type[nn.Module] | None) -> None:
        super().__init__()
        middle = 3 * inputs
        parts: list[nn.Module] = [unit(inputs, middle, 1, act=act), unit(middle, middle, 3, stride, middle, act)]
        parts += [SqueezeExcite(middle, gate)] if gate else []
        self.body = nn.Sequential(*parts, nn.Conv2d(middle, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def mobile(act: type[nn.Module], gate: type[nn.Module] | None) -> nn.Module:
    blocks = [InvertedResidual(8, 8, 1, act, gate), InvertedResidual(8, 12, 2, act, gate), InvertedResidual(12, 12, 1, act, gate)]
    return Head(nn.Sequential(unit(3, 8, 3, 2, act=act), *blocks, unit(12, 24, 1, act=act)), 24)


class ShuffleUnit(nn.Module):
    """ShuffleNet v2: split the channels, transform one half, shuffle."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        depthwise = nn.Sequential(nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False), nn.BatchNorm2d(half))
        self.branch = nn.Sequential(unit(half, half, 1), depthwise, unit(half, half, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept, changed = x.chunk(2, dim=1)
        x = torch.cat([kept, self.branch(changed)], dim=1)
        batch, channels, height, width = x.shape
        return x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)


class GroupedShuffle(nn.Module):
    """ShuffleNet v1: grouped 1 x 1 convolutions with a shuffle between them, average pooling beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 12, 3, 2)
        self.first, self.depthwise = unit(12, 12, 1, groups=3), nn.Conv2d(12, 12, 3, 2, 1, groups=12, bias=False)
        self.second, self.pool, self.fc = unit(12, 12, 1, groups=3), nn.AvgPool2d(3, 2, 1), nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        seen = self.depthwise(F.channel_shuffle(self.first(x), 3))
        return self.fc(torch.cat([self.second(seen), self.pool(x)], 1).mean((2, 3)))


class Fire(nn.Module):
    """SqueezeNet's module."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze, self.small, self.large = (
            nn.Conv2d(inputs, squeeze, 1),
            nn.Conv2d(squeeze, expand, 1),
            nn.Conv2d(squeeze, expand, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.squeeze(x), inplace=True)
        return torch.cat([F.relu(self.small(x)), F.relu(self.large(x))], 1)


def squeezenet() -> nn.Module:
    last = nn.Conv2d(24, CLASSES, 1)
    assert last.bias is not None
    nn.init.constant_(last.bias, 1.0)  # otherwise the ReLU after it may never open
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2),
        nn.ReLU(True),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        Fire(8, 4, 8),
        Fire(16, 4, 8),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        Fire(16, 6, 12),
        nn.Dropout(0.0),
        last,
        nn.ReLU(True),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
    )


class Ghost(nn.Module):
    """GhostNet: half of the features by cheap depthwise convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.main, self.cheap, self.fc = unit(3, 8, 3, 2), unit(8, 8, 1), unit(8, 8, 3, groups=8), nn.Linear(13, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.main(self.stem(x))
        return self.fc(torch.cat([seen, self.cheap(seen)], 1)[:, :13].mean((2, 3)))


class Dense(nn.Module):
    """DenseNet: every layer sees all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8 + 4 * i), nn.ReLU(), nn.Conv2d(8 + 4 * i, 4, 3, padding=1, bias=False)) for i in range(3)
        )
        self.transition = nn.Sequential(nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 10, 1, bias=False), nn.AvgPool2d(2))
        self.fc = nn.Linear(10, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [self.stem(x)]
        for layer in self.layers:
            seen.append(layer(torch.cat(seen, 1)))
        return self.fc(F.adaptive_avg_pool2d(self.transition(torch.cat(seen, 1)), (1, 1)).flatten(1))


class Inception(nn.Module):
    """Branches of several kernel sizes, an asymmetric pair among them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8, 3, 2)
        self.one, self.three = unit(8, 4, 1), nn.Sequential(unit(8, 4, 1), unit(4, 6, 3))
        self.pair = nn.Sequential(nn.Conv2d(8, 4, (1, 7), padding=(0, 3)), nn.Conv2d(4, 4, (7, 1), padding=(3, 0)), nn.ReLU())
        self.pool, self.fc = nn.Sequential(nn.MaxPool2d(3, 1, 1), unit(8, 4, 1)), nn.Linear(18, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.fc(torch.cat([self.one(x), self.three(x), self.pair(x), self.pool(x)], 1).mean((2, 3)))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 8, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 20),
        nn.Tanh(),
        nn.Linear(20, CLASSES),
    )


def vgg() -> nn.Module:
    return nn.Sequential(
        unit(3, 8),
        unit(8, 8),
        nn.MaxPool2d(2),
        unit(8, 12),
        unit(12, 12),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d((3, 3)),
        nn.Flatten(),
        nn.Linear(108, 24),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.Linear(24, CLASSES),
    )


class RepVGG(nn.Module):
    """Three parallel branches, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.large, self.small = unit(3, 8, 3, 2), nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 1, bias=False)
        self.norms, self.fc = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3)), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = F.relu(self.norms[0](self.large(x)) + self.norms[1](self.small(x)) + self.norms[2](x))
        return self.fc(x.amax((2, 3)))


class Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.tokens = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.channels = nn.Sequential(nn.Linear(16, 32), nn.GELU(approximate="tanh"), nn.Linear(32, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norms[1](x))
        return self.head(self.norms[2](x).mean(1))


class SmallViT(nn.Module):
    """A ViT from `torch.nn`'s own layers, with a class token and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 32, 8, 8), nn.Parameter(torch.randn(1, 1, 32) * 0.1)
        self.places = nn.Parameter(torch.randn(1, 17, 32) * 0.1)
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.body(x)[:, 0])


class Coord(nn.Module):
    """CoordConv and a spatial soft-argmax, for key points."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(5, 8, 3, 2, 1), nn.Conv2d(8, 4, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.linspace(-1, 1, x.shape[2], device=x.device).view(1, 1, -1, 1).expand(x.shape[0], 1, x.shape[2], x.shape[3])
        columns = torch.linspace(-1, 1, x.shape[3], device=x.device).view(1, 1, 1, -1).expand_as(rows)
        heat = self.second(F.elu(self.first(torch.cat([x, rows.to(x), columns.to(x)], 1))))
        weights = heat.flatten(2).softmax(-1).view_as(heat)
        line = torch.linspace(-1, 1, 16, dtype=x.dtype, device=x.device)
        return torch.stack([(weights.sum(3) * line).sum(2), (weights.sum(2) * line).sum(2)], -1)


def _images(side: int = 32, channels: int = 3, name: str = "x") -> dict[str, Any]:
    return {"batch": features(channels, side, side, name=name), "targets": classes()}


_SEQUENTIAL = "input"  # what the forward of nn.Sequential calls it


ENTRIES = [
    Entry("mobilenet_v2_style", "vision", lambda: mobile(nn.ReLU6, None), **_images()),
    Entry("mobilenet_v3_style", "vision", lambda: mobile(nn.Hardswish, nn.Hardsigmoid), **_images()),
    Entry("efficientnet_style", "vision", lambda: mobile(nn.SiLU, nn.Sigmoid), **_images()),
    Entry("efficientnet_lite_mish", "vision", lambda: mobile(nn.Mish, None), **_images()),
    Entry("shufflenet_v1", "vision", GroupedShuffle, **_images()),
    Entry(
        "shufflenet_v2",
        "vision",
        lambda: Head(nn.Sequential(unit(3, 12, 3, 2), nn.MaxPool2d(3, 2, 1), ShuffleUnit(12), ShuffleUnit(12)), 12),
        **_images(),
    ),
    Entry("squeezenet", "vision", squeezenet, **_images(name=_SEQUENTIAL)),
    Entry("ghostnet", "vision", Ghost, **_images()),
    Entry("densenet", "vision", Dense, **_images()),
    Entry("inception", "vision", Inception, **_images()),
    Entry("lenet", "vision", lenet, **_images(28, 1, _SEQUENTIAL)),
    Entry("vgg", "vision", vgg, **_images(24, name=_SEQUENTIAL)),
    Entry("repvgg", "vision", RepVGG, **_images()),
    Entry("mlp_mixer", "vision", Mixer, **_images()),
    Entry("vit_from_torch_nn", "vision", SmallViT, **_images()),
    Entry("key_points_soft_argmax", "vision", Coord, features(3, 32, 32), values(4, 2), loss=nn.SmoothL1Loss()),
]
