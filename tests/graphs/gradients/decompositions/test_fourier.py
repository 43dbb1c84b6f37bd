"""Fourier transforms against autograd, with a dynamic batch and a dynamic length."""

from __future__ import annotations

import pytest
import torch

from .agreement import check

DOUBLE = torch.float64
GONE = ["_fft_r2c", "_fft_c2c", "_fft_c2r"]
FUNCTIONS = {
    "rfft": lambda x: torch.view_as_real(torch.fft.rfft(x)),
    "rfft ortho": lambda x: torch.view_as_real(torch.fft.rfft(x, norm="ortho")),
    "rfft forward": lambda x: torch.view_as_real(torch.fft.rfft(x, norm="forward")),
    "rfft of 6": lambda x: torch.view_as_real(torch.fft.rfft(x, n=6)),
    "fft along": lambda x: torch.fft.fft(x, dim=1).real,
    "fft of fft": lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real,
    "rfft2": lambda x: torch.view_as_real(torch.fft.rfft2(x)),
    "there and back": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1]),
    "there and back in two axes": lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:]),
    "complex there and back": lambda x: torch.fft.ifft(torch.fft.fft(x)).real,
    "abs": lambda x: torch.fft.rfft(x).abs(),
    "angle": lambda x: torch.fft.rfft(x + 1).angle()[..., 1:3],
    "a filter": lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(x.flip(-1)), n=x.shape[-1]),
    "polar": lambda x: torch.view_as_real(torch.polar(x.abs(), x * 2)),
}


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_at_two_batch_sizes(name, size):
    batches = [[torch.randn(n, 4, size, dtype=DOUBLE)] for n in (3, 5)]
    check(FUNCTIONS[name], *batches, dynamic=[[0]], gone=GONE)


@pytest.mark.parametrize("name", ["rfft", "there and back", "complex there and back"])
def test_at_two_lengths(name):
    batches = [[torch.randn(3, 4, size, dtype=DOUBLE)] for size in (8, 11)]
    check(FUNCTIONS[name], *batches, dynamic=[[0, 2]], gone=GONE)


def test_a_long_transform_is_precise_in_float32():
    check(FUNCTIONS["rfft"], [torch.randn(2, 3000)], gone=GONE)


def test_the_absolute_value_of_zero_has_no_gradient():
    check(lambda x: torch.fft.rfft(x).abs(), [torch.zeros(2, 4)], gone=GONE)


def test_stft():
    window = torch.hann_window(8, dtype=DOUBLE)
    batches = [[torch.randn(n, 32, dtype=DOUBLE), window] for n in (3, 5)]

    def run(x, window):
        return torch.stft(x, 8, 4, window=window, return_complex=True, center=False).abs()

    check(run, *batches, dynamic=[[0]], gone=GONE)
