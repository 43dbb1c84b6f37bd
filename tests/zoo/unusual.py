"""Architectures with unusual operators: routing, memories, flows, quantizers, sorting, rendering."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from .entry import CLASSES, Entry, classes, features, nothing, series, tokens, values


class Capsules(nn.Module):
    """Routing by agreement, three rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.votes = nn.Conv2d(1, 8, 5, 2), nn.Parameter(0.3 * torch.randn(32, CLASSES, 6, 4))

    @staticmethod
    def squash(x: torch.Tensor) -> torch.Tensor:
        square = x.square().sum(-1, keepdim=True)
        return square / (1 + square) * x / torch.sqrt(square + 1e-8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        capsules = self.squash(self.conv(x).reshape(x.shape[0], 32, 4))
        votes = torch.einsum("bid,icod->bico", capsules, self.votes)
        logits = torch.zeros_like(votes[..., 0])
        for _ in range(3):
            found = self.squash((logits.softmax(2).unsqueeze(-1) * votes).sum(1))
            logits = logits + (votes * found.unsqueeze(1)).sum(-1)
        return found.norm(dim=-1)


class Memory(nn.Module):
    """A memory that is read and written by content, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.erase, self.add = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8)
        self.start, self.head = nn.Parameter(torch.randn(5, 8)), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.start.expand(x.shape[0], -1, -1)
        read = torch.zeros_like(memory[:, 0])
        for step in x.unbind(1):
            weights = F.softmax(5 * F.cosine_similarity(memory, self.keys(step).unsqueeze(1), -1), 1).unsqueeze(-1)
            memory = memory * (1 - weights * torch.sigmoid(self.erase(step)).unsqueeze(1)) + weights * self.add(step).unsqueeze(1)
            read = (weights * memory).sum(1)
        return self.head(read)


class Retention(nn.Module):
    """Attention without softmax, with a decay for each head."""

    decay: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.norm, self.head = nn.Embedding(64, 8), nn.Linear(8, 24), nn.GroupNorm(2, 8), nn.Linear(8, CLASSES)
        self.register_buffer("decay", torch.tensor([0.9, 0.8]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.words(x)).chunk(3, -1))
        places = torch.arange(x.shape[1])
        distance = places[:, None] - places[None, :]
        mask = torch.where(distance >= 0, self.decay[:, None, None] ** distance.clamp(min=0), 0.0)
        mixed = (q @ k.transpose(-1, -2) * mask @ v).transpose(1, 2).flatten(2)
        return self.head(self.norm(mixed.transpose(1, 2)).mean(-1))


class Perceiver(nn.Module):
    """A few latents attend to many inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.project = nn.Parameter(torch.randn(3, 8)), nn.Linear(6, 8)
        self.cross, self.own = nn.MultiheadAttention(8, 2, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs, latents = self.project(x), self.latents.expand(x.shape[0], -1, -1)
        latents = latents + self.cross(latents, inputs, inputs, need_weights=False)[0]
        return self.head((latents + self.own(*[self.norm(latents)] * 3, need_weights=False)[0]).mean(1))


class Diffusion(nn.Module):
    """A noise predictor with an embedding of time."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.enter, self.down = nn.Linear(8, 8), nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)
        self.norm, self.up, self.leave = nn.GroupNorm(4, 8), nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        angle = time.unsqueeze(1) * torch.exp(torch.arange(4) * -math.log(100) / 4)
        shift = self.time(torch.cat([angle.sin(), angle.cos()], 1))[:, :, None, None]
        first = F.silu(self.enter(x))
        return self.leave(torch.cat([first, self.up(F.silu(self.norm(self.down(first)) + shift))], 1))


class Flow(nn.Module):
    """Affine couplings; the module returns the negative log likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x[:, 0])
        for net in self.nets:
            a, b = x.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            x = torch.cat([b * torch.exp(torch.tanh(scale)) + shift, a], 1)
            total = total + torch.tanh(scale).sum(1)
        return (0.5 * x.square().sum(1) - total).mean()


class Quantizer(nn.Module):
    """A codebook, gradients straight through it, and its two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes, self.decode = nn.Conv1d(2, 4, 3, 2, 1), nn.Embedding(7, 4), nn.ConvTranspose1d(4, 2, 4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.encode(x).transpose(1, 2)
        nearest = torch.cdist(hidden, self.codes.weight.expand(x.shape[0], -1, -1)).argmin(-1)
        code = self.codes(nearest)
        through = hidden + (code - hidden).detach()
        return (
            F.mse_loss(self.decode(through.transpose(1, 2)), x)
            + F.mse_loss(code, hidden.detach())
            + 0.25 * F.mse_loss(hidden, code.detach())
        )


def sparsemax(x: torch.Tensor) -> torch.Tensor:
    ordered = x.sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1)
    inside = (1 + count * ordered > ordered.cumsum(-1)).to(x.dtype)
    threshold = ((ordered * inside).sum(-1, keepdim=True) - 1) / inside.sum(-1, keepdim=True)
    return torch.relu(x - threshold)


class TabNet(nn.Module):
    """Steps that choose features by sparsemax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.steps = nn.BatchNorm1d(10), nn.ModuleList(nn.Linear(10, 8) for _ in range(2))
        self.masks, self.head = nn.ModuleList(nn.Linear(8, 10) for _ in range(2)), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        prior, hidden, total = torch.ones_like(x), torch.relu(self.steps[0](x)), torch.zeros_like(x[:, :8])
        for step, mask in zip(self.steps, self.masks, strict=True):
            chosen = sparsemax(prior * mask(hidden))
            prior = prior * (1.3 - chosen)
            hidden = F.glu(torch.cat([step(x * chosen)] * 2, -1), -1)
            total = total + torch.relu(hidden)
        return self.head(total)


class Radiance(nn.Module):
    """Colours along rays, weighted by how much light gets through."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        angles = torch.cat([points * 2**place for place in range(3)], -1)
        colour, density = self.net(torch.cat([angles.sin(), angles.cos()], -1)).split([3, 1], -1)
        alpha = 1 - torch.exp(-F.softplus(density) * 0.2)
        seen = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1] + 1e-6], 1), 1)
        return (alpha * seen * torch.sigmoid(colour)).sum(1)


class ArcFace(nn.Module):
    """An angular margin between classes; takes the labels and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.centres = nn.Linear(6, 8), nn.Parameter(torch.randn(CLASSES, 8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.centres)).clamp(-0.999, 0.999)
        margin = F.one_hot(labels, CLASSES) * 0.3
        return F.cross_entropy(8 * torch.cos(torch.acos(cosine) + margin), labels)


class Discriminator(nn.Module):
    """Spectral norms: buffers that change in every step."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.conv, self.fc = norm(nn.Conv2d(3, 4, 4, 2, 1)), norm(nn.Linear(4 * 16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.leaky_relu(self.conv(x), 0.2).flatten(1))


class Hyper(nn.Module):
    """A network that makes the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.head = nn.Linear(6, 6 * 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(torch.bmm(self.make(x).reshape(-1, 8, 6), x.unsqueeze(-1)).squeeze(-1)))


def _face(size: int, length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(size, 6), "labels": torch.randint(0, CLASSES, (size,))}


def _noisy(size: int, length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(size, 3, 8, 8), "time": torch.rand(size) * 10}


ENTRIES = [
    Entry("capsules", "vision", Capsules, features(1, 11, 11), classes()),
    Entry("content_memory", "series", Memory, series(6), classes(), lengths=(4, 4)),
    Entry("retention", "text", Retention, tokens("x"), classes(), lengths=(6, 9), sequence={"x": (1,)}),
    Entry("perceiver", "series", Perceiver, series(6), classes(), lengths=(7, 9), sequence={"x": (1,)}),
    Entry("diffusion_noise", "vision", Diffusion, _noisy, values(3, 8, 8), loss="mse"),
    Entry("real_nvp", "tables", Flow, features(6), nothing, loss=None),
    Entry("vector_quantizer", "audio", Quantizer, features(2, 8), nothing, loss=None),
    Entry("tabnet_sparsemax", "tables", TabNet, features(10), classes()),
    Entry("radiance_field", "vision", Radiance, features(5, 3, name="points"), values(3), loss="mse"),
    Entry("arcface", "vision", ArcFace, _face, nothing, loss=None),
    Entry("spectral_norm_discriminator", "vision", Discriminator, features(3, 8, 8), values(1), loss="mse"),
    Entry("hypernetwork", "tables", Hyper, features(6), classes()),
]
