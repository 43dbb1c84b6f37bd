"""Fourier transforms. ONNX has no complex numbers: the last axis holds the real and the imaginary part, or the real part alone."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import Int, Ints, register_op


@register_op("DFT", since=17)
def dft(x: Tensor, length: Ints | None = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0) -> Tensor:
    size = length if length is None or isinstance(length, int) else length[0]
    if axis < 0:
        axis += x.dim()  # it counts the axis of the parts too, which a complex tensor does not have
    if inverse and onesided:  # half of a spectrum, whose other half mirrors it
        mirrored: Tensor = torch.fft.irfft(torch.view_as_complex(x.contiguous()), size, axis)
        return mirrored.unsqueeze(-1)
    whole = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x.squeeze(-1)
    if inverse:
        return torch.view_as_real(torch.fft.ifft(whole, size, axis))
    return torch.view_as_real(torch.fft.rfft(whole, size, axis) if onesided else torch.fft.fft(whole, size, axis))


@register_op("DFT", since=20)
def dft_along(x: Tensor, length: Ints | None = None, axis: Int = -2, *, inverse: int = 0, onesided: int = 0) -> Tensor:
    """The axis is an input since opset 20."""
    return dft(x, length, axis=axis if isinstance(axis, int) else axis[0], inverse=inverse, onesided=onesided)
