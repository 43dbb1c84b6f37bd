"""Pooling with a fixed window against autograd: divisors, partial windows, padding, dynamic sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from .agreement import check

AVERAGES = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
MAXIMA = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, dict, list[int]]:
    axes = draw(st.integers(1, 3))
    kernel = [draw(st.integers(1, 4)) for _ in range(axes)]
    options = {
        "kernel_size": kernel,
        "stride": [draw(st.integers(1, 4)) for _ in range(axes)],
        "padding": [draw(st.integers(0, size // 2)) for size in kernel],
        "ceil_mode": draw(st.booleans()),
    }
    return axes, options, [draw(st.integers(size, size + 5)) for size in kernel]


def _batches(sizes: list[int], *more: int) -> list[list[torch.Tensor]]:
    """Batches of 2 and 3, the second with images larger by `more`."""
    return [[torch.randn(batch, 3, *(size + plus for size in sizes), dtype=torch.float64)] for batch, plus in ((2, 0), (3, sum(more)))]


@settings(max_examples=15)
@given(windows(), st.booleans(), st.sampled_from([None, None, 1, 5]))
def test_average_pooling_at_two_batch_sizes(case, counted, divisor):
    axes, options, sizes = case
    options = {**options, "count_include_pad": counted, **({"divisor_override": divisor} if axes > 1 else {})}
    check(
        lambda x: AVERAGES[axes - 1](x, **options),
        *_batches(sizes),
        dynamic=[[0]],
        gone=[
            "avg_pool2d_backward",
            "avg_pool3d_backward",
            *(["avg_pool2d", "avg_pool3d"] if options["ceil_mode"] or options.get("divisor_override") else []),
        ],
    )


@settings(max_examples=8)
@given(windows(), st.booleans(), st.sampled_from([None, 5]), st.integers(0, 4))
def test_average_pooling_at_two_image_sizes(case, counted, divisor, more):
    axes, options, sizes = case
    options = {**options, "ceil_mode": False, "count_include_pad": counted, **({"divisor_override": divisor} if axes > 1 else {})}
    batches = _batches([size + 8 for size in sizes], more)  # more than one window: PyTorch takes a size of 1 for a constant
    check(lambda x: AVERAGES[axes - 1](x, **options), *batches, dynamic=[[0, *range(2, 2 + axes)]])


@pytest.mark.parametrize("counted", [True, False])
def test_partial_windows_of_an_image_of_dynamic_size(counted):
    batches = [[torch.randn(2, 3, 9, 8)], [torch.randn(3, 3, 11, 10)]]
    check(lambda x: F.avg_pool2d(x, 3, 2, 1, True, counted), *batches, dynamic=[[0, 2, 3]], gone=["avg_pool2d", "avg_pool2d_backward"])


def test_average_pooling_that_onnx_has_stays():
    """Decomposing it would be slower."""
    graph = check(lambda x: F.avg_pool2d(x, 2), [torch.randn(2, 3, 4, 6)])
    assert "torch.ops.aten.avg_pool2d.default" in graph.code


@settings(max_examples=12)
@given(windows(), st.integers(1, 2))
def test_max_pooling(case, dilation):
    axes, options, sizes = case
    if dilation == 2:
        sizes = [size * 2 for size in sizes]
    batches = _batches(sizes)
    gone = ["max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"]
    check(lambda x: MAXIMA[axes - 1](x, dilation=dilation, **options), *batches, dynamic=[[0]], gone=gone)


def test_the_first_of_equal_maxima_gets_the_gradient():
    x = torch.tensor([[[[1.0, 1.0, 2.0, 0.0], [1.0, 1.0, 2.0, 2.0]]]])
    check(lambda x: F.max_pool2d(x, 2), [x])
