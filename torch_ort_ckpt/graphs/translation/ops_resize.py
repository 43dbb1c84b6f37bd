"""Resize and Upsample: one interpolation per axis, as a choice of elements (nearest) or a small matrix (linear, cubic)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import Ints, register_op


@register_op("Resize", since=11)
def resize(
    x: Tensor,
    roi: Ints | None = None,
    scales: Ints | None = None,
    sizes: Ints | None = None,
    *,
    antialias: int = 0,
    axes: Any = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:
    places = [a % x.dim() for a in axes] if axes is not None else list(range(x.dim()))
    lengths = [x.shape[a] for a in places]
    if sizes is not None and len(sizes) > 0:
        ratios = [size / length for size, length in zip(sizes, lengths, strict=True)]
        targets = list(sizes)
        if keep_aspect_ratio_policy != "stretch":
            ratio = min(ratios) if keep_aspect_ratio_policy == "not_larger" else max(ratios)
            ratios = [ratio] * len(ratios)
            targets = [math.floor(ratio * length + 0.5) for length in lengths]
    else:
        ratios = list(scales or ())
        targets = [math.floor(length * ratio) for length, ratio in zip(lengths, ratios, strict=True)]
    if _is_torch_s(x, places, targets, ratios, mode, coordinate_transformation_mode, antialias):
        return F.interpolate(
            x, size=tuple(targets[-(x.dim() - 2) :]), mode=("linear", "bilinear", "trilinear")[x.dim() - 3], align_corners=False
        )
    outside: list[tuple[int, Tensor]] = []
    for i, axis in enumerate(places):
        start, end = (roi[i], roi[len(places) + i]) if roi else (0.0, 1.0)
        if targets[i] == lengths[i] and ratios[i] == 1.0 and coordinate_transformation_mode != "tf_crop_and_resize":
            continue
        at = _coordinates(coordinate_transformation_mode, lengths[i], targets[i], ratios[i], (start, end), x.device)
        if coordinate_transformation_mode == "tf_crop_and_resize":
            outside.append((axis, (at < 0) | (at > lengths[i] - 1)))
        if mode == "nearest":
            x = x.index_select(axis, _nearest(at, nearest_mode).clamp(0, lengths[i] - 1))
        else:
            shrink = min(ratios[i], 1.0) if antialias else 1.0
            matrix = _weights(at, lengths[i], mode, shrink, cubic_coeff_a, bool(exclude_outside))
            x = torch.matmul(x.movedim(axis, -1), matrix.to(x.dtype).t()).movedim(-1, axis)
    for axis, mask in outside:
        x = torch.where(mask.reshape([-1 if k == axis else 1 for k in range(x.dim())]), extrapolation_value, x)
    return x


@register_op("Upsample", since=9)
@register_op("Resize", since=10)
def resize_by_scales(x: Tensor, scales: Ints, *, mode: str = "nearest") -> Tensor:
    """Before opset 11: coordinates divided by the scale, rounded down for `nearest`."""
    return resize(x, None, scales, coordinate_transformation_mode="asymmetric", mode=mode, nearest_mode="floor")


@register_op("Upsample", since=7)
def upsample_by_attribute(x: Tensor, *, scales: Any, mode: str = "nearest") -> Tensor:
    return resize_by_scales(x, scales, mode=mode)


def _is_torch_s(x: Tensor, places: Any, targets: Any, ratios: Any, mode: str, transformation: str, antialias: int) -> bool:
    """Whether `F.interpolate` computes just this (and faster): linear with half-pixel centers over all spatial axes."""
    if mode != "linear" or transformation not in ("half_pixel", "pytorch_half_pixel") or antialias or x.dim() not in (3, 4, 5):
        return False
    kept = all(targets[i] == x.shape[axis] for i, axis in enumerate(places) if axis < 2)
    spatial = sum(axis >= 2 for axis in places) == x.dim() - 2 and list(places) == sorted(places)
    exact = all(targets[i] == ratios[i] * x.shape[axis] for i, axis in enumerate(places)) and min(targets) > 1
    return kept and spatial and exact


def _coordinates(transformation: str, length: int, target: int, scale: float, window: tuple[float, float], device: torch.device) -> Tensor:
    """Where each output element lies on the input axis."""
    x = torch.arange(target, dtype=torch.float64, device=device)
    start, end = window
    if transformation == "align_corners":
        return x * ((length - 1) / (length * scale - 1)) if length * scale > 1 else x * 0
    if transformation == "asymmetric":
        return x / scale
    if transformation == "tf_half_pixel_for_nn":
        return (x + 0.5) / scale
    if transformation == "tf_crop_and_resize":
        if target == 1:
            return x + 0.5 * (start + end) * (length - 1)
        return start * (length - 1) + x * ((end - start) * (length - 1) / (target - 1))
    if transformation == "pytorch_half_pixel" and target == 1:
        return x * 0
    half = (x + 0.5) / scale - 0.5
    if transformation == "half_pixel_symmetric":
        return half + length / 2 * (1 - target / (scale * length))
    return half


def _nearest(at: Tensor, mode: str) -> Tensor:
    rounded = {
        "round_prefer_floor": lambda: torch.ceil(at - 0.5),
        "round_prefer_ceil": lambda: torch.floor(at + 0.5),
        "floor": lambda: torch.floor(at),
        "ceil": lambda: torch.ceil(at),
    }[mode]()
    return rounded.long()


def _weights(at: Tensor, length: int, mode: str, shrink: float, a: float, exclude_outside: bool) -> Tensor:
    """The interpolation as a matrix [target, length]; with antialiasing the filter is widened by 1 / shrink."""
    first = math.floor(-(2 if mode == "cubic" else 1) / shrink) + 1
    taps = torch.arange(first, 2 - first, device=at.device)
    base = torch.floor(at)
    # A coordinate on a grid point belongs to the interval before it in ONNX's reference, which matters for wide filters only.
    distance = ((base[:, None] + taps) - at[:, None]).abs() * shrink
    weights = _cubic(distance, a) if mode == "cubic" else (1 - distance).clamp(min=0)
    places = base[:, None].long() + taps
    if exclude_outside:
        weights = weights * ((places >= 0) & (places < length))
    weights = weights / weights.sum(1, keepdim=True)
    return weights.new_zeros(len(at), length).scatter_add(1, places.clamp(0, length - 1), weights)


def _cubic(distance: Tensor, a: float) -> Tensor:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))


@register_op("GridSample", since=16)
def grid_sample(x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros") -> Tensor:
    """The modes were called bilinear and bicubic before opset 20."""
    name = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return F.grid_sample(x, grid, name, padding_mode, bool(align_corners))


@register_op("AffineGrid")
def affine_grid(theta: Tensor, size: Ints, *, align_corners: int = 0) -> Tensor:
    return F.affine_grid(theta, list(size), bool(align_corners))


@register_op("CenterCropPad", since=18)
def center_crop_pad(x: Tensor, shape: Ints, *, axes: Any = None) -> Tensor:
    for i, target in enumerate(shape):
        axis = (axes[i] if axes is not None else i) % x.dim()
        size = x.shape[axis]
        if target <= size:
            x = x.narrow(axis, (size - target) // 2, target)
        else:
            before = (target - size) // 2
            pads = [0] * (2 * x.dim())
            pads[2 * (x.dim() - 1 - axis)], pads[2 * (x.dim() - 1 - axis) + 1] = before, target - size - before
            x = F.pad(x, pads)
    return x
