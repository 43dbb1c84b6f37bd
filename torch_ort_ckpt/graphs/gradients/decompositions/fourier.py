"""Fourier transforms as products with matrices of cosines and sines.

All of `torch.fft` and `torch.stft` is made of three operators. A complex tensor is a pair of real ones here: ONNX has no complex numbers,
and PyTorch's own rules for the gradient of these operators do not take a dynamic batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .registry import before
from .sizes import product

aten = torch.ops.aten
Pair = tuple[torch.Tensor, torch.Tensor | None]


def _angles(rows: Any, columns: Any, size: Any, like: torch.Tensor) -> torch.Tensor:
    """[rows, columns]: 2 pi row column / size. The product is reduced while it is still a whole number, for precision."""
    row = torch.arange(rows, device=like.device)
    column = torch.arange(columns, device=like.device)
    return ((row.unsqueeze(1) * column.unsqueeze(0)) % size).to(like.dtype) * (2.0 * math.pi / size)


def _along(x: torch.Tensor, axis: int, matrix: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x.transpose(axis, -1), matrix).transpose(axis, -1)


def _transform(pair: Pair, axis: int, outputs: Any, forward: bool) -> Pair:
    """The first `outputs` frequencies along an axis; backward has the other sign, and no division."""
    real, imaginary = pair
    size = real.shape[axis]
    angles = _angles(size, outputs, size, real)
    cosine, sine = torch.cos(angles), torch.sin(angles)
    if forward:
        sine = -sine
    if imaginary is None:
        return _along(real, axis, cosine), _along(real, axis, sine)
    return (
        _along(real, axis, cosine) - _along(imaginary, axis, sine),
        _along(real, axis, sine) + _along(imaginary, axis, cosine),
    )


def _scale(sizes: Sequence[Any], normalization: int) -> Any:
    """PyTorch's codes: 0 for none, 1 for the square root of the number of elements, 2 for that number."""
    count = product(sizes)
    return {0: 1.0, 1: 1.0 / torch.sym_sqrt(count), 2: 1.0 / count}[normalization]


def _pair(x: torch.Tensor) -> Pair:
    parts = torch.view_as_real(x.resolve_conj())
    return parts[..., 0], parts[..., 1]


def _complex(pair: Pair, scale: Any) -> torch.Tensor:
    real, imaginary = pair
    assert imaginary is not None
    return torch.view_as_complex(torch.stack([real, imaginary], -1) * scale)


@before(aten._fft_r2c.default)
def fft_r2c(x: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> torch.Tensor:
    """Of real numbers. The last axis of `dim` keeps half of its frequencies: the others are their conjugates."""
    sizes = [x.shape[axis] for axis in dim]
    pair = _transform((x, None), dim[-1] % x.dim(), sizes[-1] // 2 + 1 if onesided else sizes[-1], True)
    for axis, size in zip(dim[:-1], sizes, strict=False):
        pair = _transform(pair, axis % x.dim(), size, True)
    return _complex(pair, _scale(sizes, normalization))


@before(aten._fft_c2c.default)
def fft_c2c(x: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> torch.Tensor:
    pair = _pair(x)
    for axis in dim:
        pair = _transform(pair, axis % x.dim(), x.shape[axis], forward)
    return _complex(pair, _scale([x.shape[axis] for axis in dim], normalization))


@before(aten._fft_c2r.default)
def fft_c2r(x: torch.Tensor, dim: Sequence[int], normalization: int, last_dim_size: Any) -> torch.Tensor:
    """To real numbers, from half of the frequencies: each but the first, and the last of an even size, stands for its conjugate too."""
    pair = _pair(x)
    for axis in dim[:-1]:
        pair = _transform(pair, axis % x.dim(), x.shape[axis], False)
    real, imaginary = pair
    assert imaginary is not None
    last = dim[-1] % x.dim()
    frequencies = x.shape[last]
    angles = _angles(frequencies, last_dim_size, last_dim_size, real)
    index = torch.arange(frequencies, device=x.device)
    alone = (index == 0) | (index * 2 == last_dim_size)
    times = (2.0 - alone.to(real.dtype)).unsqueeze(1)
    result = _along(real, last, torch.cos(angles) * times) - _along(imaginary, last, torch.sin(angles) * times)
    return result * _scale([*(x.shape[axis] for axis in dim[:-1]), last_dim_size], normalization)


@before(aten.abs.default)
def abs_of_complex(x: torch.Tensor) -> torch.Tensor:
    """Zero has the gradient zero, as in PyTorch."""
    if not x.is_complex():
        return NotImplemented
    real, imaginary = _pair(x)
    assert imaginary is not None
    squares = real * real + imaginary * imaginary
    zero = squares == 0
    return torch.where(zero, 0.0, torch.sqrt(torch.where(zero, 1.0, squares)))


@before(aten.angle.default)
def angle_of_complex(x: torch.Tensor) -> torch.Tensor:
    if not x.is_complex():
        return NotImplemented
    real, imaginary = _pair(x)
    assert imaginary is not None
    return torch.atan2(imaginary, real)


@before(aten.polar.default)
def polar(length: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(torch.stack([length * torch.cos(angle), length * torch.sin(angle)], -1))
