"""Images in, images or boxes out: U-Nets, super resolution, autoencoders, style, detectors, as apps have them."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from .entry import CLASSES, Batch, Entry, both, classes, features, values
from .phones import unit


class UNet(nn.Module):
    """Two levels; `mode` is how the small one is enlarged."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.down, self.deep, self.out, self.last = unit(3, 8), unit(8, 12), unit(20, 8), nn.Conv2d(8, CLASSES, 1)
        self.up: nn.Module = nn.ConvTranspose2d(12, 12, 2, 2)
        if mode != "transposed":
            self.up = nn.Upsample(scale_factor=2, mode=mode, align_corners=None if mode == "nearest" else mode == "bicubic")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.down(x)
        low = self.deep(F.max_pool2d(high, 2))
        return self.last(self.out(torch.cat([self.up(low), high], 1)))


class DeepLab(nn.Module):
    """Atrous pyramid and `F.interpolate` to the input's size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8, 3, 2)
        self.rates = nn.ModuleList(nn.Conv2d(8, 6, 3, padding=rate, dilation=rate, bias=False) for rate in (1, 2, 4))
        self.image, self.norm, self.last = nn.Conv2d(8, 6, 1), nn.BatchNorm2d(24), nn.Conv2d(24, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.stem(x)
        whole = F.interpolate(self.image(F.adaptive_avg_pool2d(seen, 1)), size=seen.shape[2:], mode="nearest")
        joined = self.norm(torch.cat([*(rate(seen) for rate in self.rates), whole], 1))
        return F.interpolate(self.last(F.relu(joined)), size=x.shape[2:], mode="bilinear", align_corners=False)


def dice_and_cross_entropy(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The usual pair for segmentation."""
    likely = logits.softmax(1)
    truth = F.one_hot(mask, CLASSES).movedim(-1, 1).to(logits.dtype)
    overlap = (likely * truth).sum((2, 3))
    dice = (2 * overlap + 1) / (likely.sum((2, 3)) + truth.sum((2, 3)) + 1)
    return F.cross_entropy(logits, mask) + 1 - dice.mean()


class Style(nn.Module):
    """Fast style transfer: reflection pads, instance norms, nearest upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ReflectionPad2d(2),
            nn.Conv2d(3, 8, 5),
            nn.InstanceNorm2d(8, affine=True),
            nn.ReLU(),
            nn.ReflectionPad2d(1),
            nn.Conv2d(8, 12, 3, 2),
            nn.InstanceNorm2d(12, affine=True),
            nn.ReLU(),
            nn.Upsample(scale_factor=2),
            nn.ReplicationPad2d(1),
            nn.Conv2d(12, 3, 3),
            nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def style_loss(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Content, Gram matrices and total variation."""

    def gram(x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(2)
        return flat @ flat.transpose(1, 2) / flat.shape[2]

    variation = (found[..., 1:] - found[..., :-1]).abs().mean() + (found[..., 1:, :] - found[..., :-1, :]).abs().mean()
    return F.mse_loss(found, target) + F.mse_loss(gram(found), gram(target)) + 0.1 * variation


def super_resolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 4, 3, padding=1),
        nn.PixelShuffle(2),
    )


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, 2, 1),
        nn.ELU(),
        nn.Conv2d(6, 8, 3, 2, 1),
        nn.ELU(),
        nn.Flatten(),
        nn.Linear(128, 10),
        nn.Linear(10, 128),
        nn.Unflatten(1, (8, 4, 4)),
        nn.ConvTranspose2d(8, 6, 3, 2, 1, 1),
        nn.ELU(),
        nn.ConvTranspose2d(6, 1, 3, 2, 1, 1),
    )


class Variational(nn.Module):
    """A VAE that takes its noise as an input and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(36, 12), nn.Sequential(nn.Linear(6, 24), nn.Softplus(), nn.Linear(24, 36))

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        found = self.decoder(mean + noise * torch.exp(0.5 * log_variance))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.binary_cross_entropy_with_logits(found, torch.sigmoid(x)) + 0.01 * divergence


class Yolo(nn.Module):
    """One scale: boxes, objectness and classes on a grid, decoded with anchors."""

    anchors: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Sequential(unit(3, 8, 3, 2, act=nn.SiLU), unit(8, 12, 3, 2, act=nn.SiLU)),
            nn.Conv2d(12, 2 * (5 + CLASSES), 1),
        )
        self.register_buffer("anchors", torch.tensor([[1.0, 2.0], [3.0, 1.5]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.head(self.body(x))
        batch, _, height, width = seen.shape
        seen = seen.view(batch, 2, 5 + CLASSES, height, width).permute(0, 1, 3, 4, 2)
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centre = (seen[..., :2].sigmoid() + torch.stack([columns, rows], -1)) / height
        size = seen[..., 2:4].clamp(-4, 4).exp() * self.anchors[:, None, None] / height
        return torch.cat([centre, size, seen[..., 4:]], -1)


def yolo_loss(found: torch.Tensor, boxes: torch.Tensor, objects: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """IoU of boxes, focal loss of objectness, cross entropy of classes where there is an object."""
    low, high = found[..., :2] - found[..., 2:4] / 2, found[..., :2] + found[..., 2:4] / 2
    low_true, high_true = boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2
    overlap = (torch.minimum(high, high_true) - torch.maximum(low, low_true)).clamp(min=0).prod(-1)
    union = found[..., 2] * found[..., 3] + boxes[..., 2] * boxes[..., 3] - overlap
    entropy = F.binary_cross_entropy_with_logits(found[..., 4], objects, reduction="none")
    focal = ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()
    kinds = F.cross_entropy(found[..., 5:].flatten(0, 3), labels.flatten(), reduction="none")
    return focal + ((1 - overlap / (union + 1e-7)) * objects).mean() + (kinds * objects.flatten()).sum() / (objects.sum() + 1)


def _grid(size: int, length: int) -> Batch:
    shape = (size, 2, 4, 4)
    return {
        "boxes": 0.2 + torch.rand(*shape, 4) / 2,
        "objects": (torch.rand(shape) > 0.5).float(),
        "labels": torch.randint(0, CLASSES, shape),
    }


class BlazeFace(nn.Module):
    """Two feature maps, each with its own heads, concatenated; several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = unit(3, 8, 5, 4), unit(8, 12, 3, 2)
        self.scores, self.boxes = (
            nn.ModuleList([nn.Conv2d(8, 2, 1), nn.Conv2d(12, 2, 1)]),
            nn.ModuleList([nn.Conv2d(8, 8, 1), nn.Conv2d(12, 8, 1)]),
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        maps = [seen := self.first(x), self.second(seen)]
        scores = [head(seen).permute(0, 2, 3, 1).flatten(1) for head, seen in zip(self.scores, maps, strict=True)]
        boxes = [head(seen).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4) for head, seen in zip(self.boxes, maps, strict=True)]
        return {"scores": torch.cat(scores, 1), "boxes": torch.cat(boxes, 1)}


def face_loss(outputs: dict[str, torch.Tensor], faces: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(outputs["scores"], faces) + F.smooth_l1_loss(
        outputs["boxes"] * faces[..., None], boxes * faces[..., None]
    )


class Spatial(nn.Module):
    """A spatial transformer: a predicted affine grid samples the image."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.what = nn.Linear(256, 6), nn.Linear(256, CLASSES)
        nn.init.normal_(self.where.weight, std=0.01)
        self.where.bias.data.copy_(torch.tensor([0.9, 0.05, 0.03, -0.04, 1.1, 0.02]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = F.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3), [x.shape[0], 1, 16, 16], align_corners=False)
        return self.what(F.grid_sample(x, grid, align_corners=False).flatten(1))


class Video(nn.Module):
    """3-D convolutions over clips."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(3, 6, (3, 5, 5), (1, 2, 2), (1, 2, 2), bias=False),
            nn.BatchNorm3d(6),
            nn.ReLU(),
            nn.MaxPool3d(2),
            nn.Conv3d(6, 8, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
            nn.Linear(8, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Siamese(nn.Module):
    """Triplets of images through one network."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(unit(1, 6, 3, 2), unit(6, 8, 3, 2), nn.Flatten(), nn.Linear(128, 12))

    def forward(self, anchor: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        first, second, third = (F.normalize(self.body(x), dim=1) for x in (anchor, positive, negative))
        return F.triplet_margin_loss(first, second, third, margin=0.5)


_MASK = classes(CLASSES, "mask", 16, 16)

ENTRIES = [
    *(
        Entry(f"unet_{mode}", "vision", partial(UNet, mode), features(3, 16, 16), _MASK, loss=dice_and_cross_entropy)
        for mode in ("bilinear", "nearest", "bicubic", "transposed")
    ),
    Entry("deeplab", "vision", DeepLab, features(3, 16, 16), _MASK, loss=nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0)),
    Entry("style_transfer", "vision", Style, features(3, 16, 16), values(3, 16, 16), loss=style_loss),
    Entry("espcn_super_resolution", "vision", super_resolution, features(1, 12, 12, name="input"), values(1, 24, 24), loss="mse"),
    Entry("convolutional_autoencoder", "vision", autoencoder, features(1, 16, 16, name="input"), values(1, 16, 16), loss="mse"),
    Entry(
        "variational_autoencoder", "vision", Variational, both(features(36), features(6, name="noise")), lambda size, length: {}, loss=None
    ),
    Entry("yolo_style", "vision", Yolo, features(3, 16, 16), _grid, loss=yolo_loss),
    Entry(
        "blazeface_style",
        "vision",
        BlazeFace,
        features(3, 32, 32),
        lambda size, length: {"faces": (torch.rand(size, 160) > 0.5).float(), "boxes": torch.randn(size, 160, 4)},
        loss=face_loss,
    ),
    Entry("spatial_transformer", "vision", Spatial, features(1, 16, 16), classes()),
    Entry("video_3d", "vision", Video, features(3, 4, 16, 16), classes()),
    Entry(
        "siamese_triplet",
        "vision",
        Siamese,
        both(features(1, 16, 16, name="anchor"), features(1, 16, 16, name="positive"), features(1, 16, 16, name="negative")),
        lambda size, length: {},
        loss=None,
    ),
]
