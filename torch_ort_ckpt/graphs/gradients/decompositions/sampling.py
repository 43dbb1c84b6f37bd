"""affine_grid and grid_sample: an image read at given places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .registry import before
from .sizes import is_static, product

aten = torch.ops.aten
BILINEAR, NEAREST, BICUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2


@before(aten.affine_grid_generator.default)
def affine_grid_generator(theta: torch.Tensor, size: Sequence[Any], align_corners: bool) -> torch.Tensor:
    """[N, *size, axes]: the places of an image's elements after a linear map; PyTorch's own takes no symbolic batch."""
    axes = len(size) - 2
    shape = list(size[2:])
    parts = []
    for i in reversed(range(axes)):  # a grid names the last axis first
        index = torch.arange(shape[i], device=theta.device).to(theta.dtype)
        if align_corners:
            places = index * (2.0 / (shape[i] - 1)) - 1.0 if not is_static(shape[i]) or shape[i] > 1 else index
        else:
            places = (index * 2.0 + 1.0) / shape[i] - 1.0
        parts.append(places.reshape([shape[i], *[1] * (axes - 1 - i)]).expand(shape))
    base = torch.stack([*parts, torch.ones_like(parts[0])], -1).reshape([1, product(shape), axes + 1])
    return torch.matmul(base, theta.transpose(1, 2)).reshape([theta.shape[0], *shape, axes])


@before(aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(
    x: torch.Tensor, grid: torch.Tensor, interpolation_mode: int = BILINEAR, padding_mode: int = ZEROS, align_corners: bool = False
) -> torch.Tensor:
    """[N, C, *size] read at [N, *out, axes]: the weighted sum of an element's neighbours, each gathered by its place in the plane."""
    axes = grid.shape[-1]
    sizes = list(x.shape[2:])
    places = []
    for i in range(axes):  # a grid names the last axis first
        coordinate = grid[..., axes - 1 - i]
        size = sizes[i]
        place = (coordinate + 1.0) * ((size - 1) / 2.0) if align_corners else ((coordinate + 1.0) * size - 1.0) / 2.0
        places.append(place if interpolation_mode == BICUBIC else _into_range(place, size, padding_mode, align_corners))
    if interpolation_mode == NEAREST:
        return _gather(x, [torch.round(place) for place in places], padding_mode, align_corners)
    floors = [torch.floor(place) for place in places]
    fractions = [place - below for place, below in zip(places, floors, strict=True)]
    weights = [_cubic(fraction) if interpolation_mode == BICUBIC else [1.0 - fraction, fraction] for fraction in fractions]
    first = -1 if interpolation_mode == BICUBIC else 0
    result: Any = 0
    for neighbour in _corners(axes, len(weights[0])):
        at = [below + (first + step) for below, step in zip(floors, neighbour, strict=True)]
        weight = weights[0][neighbour[0]]
        for i in range(1, axes):
            weight = weight * weights[i][neighbour[i]]
        result = result + _gather(x, at, padding_mode, align_corners) * weight.unsqueeze(1)
    return result


def _corners(axes: int, steps: int) -> list[list[int]]:
    corners: list[list[int]] = [[]]
    for _ in range(axes):
        corners = [[*corner, step] for corner in corners for step in range(steps)]
    return corners


def _cubic(t: torch.Tensor) -> list[torch.Tensor]:
    """The weights of the four neighbours; -0.75 is PyTorch's constant."""
    a = -0.75
    far, near = lambda d: ((a * d - 5 * a) * d + 8 * a) * d - 4 * a, lambda d: ((a + 2) * d - (a + 3)) * d * d + 1
    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _into_range(place: torch.Tensor, size: Any, padding_mode: int, align_corners: bool) -> torch.Tensor:
    if padding_mode == ZEROS:
        return place
    if padding_mode == REFLECTION:
        low, span = (0.0, size - 1) if align_corners else (-0.5, size)
        if isinstance(span, int) and span == 0:
            return place * 0.0
        distance = (place - low).abs()
        flips = torch.floor(distance / span)
        rest = distance - flips * span
        odd = flips - 2.0 * torch.floor(flips / 2.0)
        place = torch.where(odd == 0, rest + low, span - rest + low)
    return torch.clamp(place, min=0, max=size - 1)


def _gather(x: torch.Tensor, at: Sequence[torch.Tensor], padding_mode: int, align_corners: bool) -> torch.Tensor:
    """The elements at whole-numbered places, and zeros for places outside."""
    batch, channels, *sizes = x.shape
    position: Any = 0
    inside: Any = None
    for place, size in zip(at, sizes, strict=True):
        if padding_mode == ZEROS:
            here = (place >= 0) & (place <= size - 1)
            inside = here if inside is None else inside & here
            place = torch.clamp(place, min=0, max=size - 1)
        else:
            place = _into_range(place, size, padding_mode, align_corners)
        position = position * size + place.detach().to(torch.int64)
    out = list(position.shape[1:])
    flat = position.reshape([batch, 1, product(out)]).expand([batch, channels, product(out)])
    found = torch.gather(x.reshape([batch, channels, product(sizes)]), 2, flat).reshape([batch, channels, *out])
    return found if inside is None else found * inside.to(x.dtype).unsqueeze(1)
