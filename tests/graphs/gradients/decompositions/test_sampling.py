"""grid_sample and affine_grid against autograd, in every mode, with a dynamic batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from .agreement import check

GONE = ["grid_sampler_2d", "grid_sampler_3d", "grid_sampler_2d_backward", "grid_sampler_3d_backward", "affine_grid_generator"]
DOUBLE = torch.float64


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample(mode, padding, align_corners):
    """Half of the places are outside the image."""
    x, grid = torch.randn(2, 3, 5, 4, dtype=DOUBLE), torch.randn(2, 6, 7, 2, dtype=DOUBLE) * 1.5
    check(lambda x, grid: F.grid_sample(x, grid, mode, padding, align_corners), [x, grid], gone=GONE)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_grid_sample_of_volumes(mode, padding):
    x, grid = torch.randn(2, 3, 5, 4, 3, dtype=DOUBLE), torch.randn(2, 2, 3, 4, 3, dtype=DOUBLE)
    check(lambda x, grid: F.grid_sample(x, grid, mode, padding, False), [x, grid], gone=GONE)


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 4, 3, 5)])
def test_affine_grid_with_a_dynamic_batch(shape, align_corners):
    axes = len(shape) - 1

    def run(x, theta):
        return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners), align_corners=align_corners)

    batches = [
        [torch.randn(n, *shape, dtype=DOUBLE), torch.randn(n, axes, axes + 1, dtype=DOUBLE)] for n in (4, 7)
    ]  # a batch of 2 is the smallest symbol: comparing it fixes it
    check(run, *batches, dynamic=[[0], [0]], gone=GONE)


def test_places_are_multiplied_out_for_images_of_dynamic_size():
    batches = [[torch.randn(2, 3, 5 + plus, 4 + plus, dtype=DOUBLE), torch.randn(2, 6, 7, 2, dtype=DOUBLE)] for plus in (0, 2)]
    check(lambda x, grid: F.grid_sample(x, grid, align_corners=True), *batches, dynamic=[[0, 2, 3], [0]], gone=GONE)
