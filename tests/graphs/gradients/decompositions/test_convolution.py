"""Convolutions against autograd: 1 to 3 dimensions, strides, padding, dilation, groups, transposed, dynamic sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ort_ckpt.graphs.gradients.decompositions import convolution

from .agreement import check

aten = torch.ops.aten
FORWARD = {False: (F.conv1d, F.conv2d, F.conv3d), True: (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)}


@st.composite
def convolutions(draw: st.DrawFn) -> dict:
    axes = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    each = st.lists(st.integers(1, 3), min_size=axes, max_size=axes)
    stride, dilation, kernel = draw(each), draw(each), draw(each)
    transposed = draw(st.booleans())
    padding = [draw(st.integers(0, dilation[i] * (kernel[i] - 1))) for i in range(axes)]
    extra = [draw(st.integers(0, max(stride[i], dilation[i]) - 1)) for i in range(axes)] if transposed else [0] * axes
    window = [dilation[i] * (kernel[i] - 1) + 1 for i in range(axes)]
    sizes = [draw(st.integers(1 if transposed else window[i], window[i] + 4)) for i in range(axes)]
    if transposed:  # the output must not be empty
        sizes = [max(size, (2 * padding[i] - window[i]) // stride[i] + 2) for i, size in enumerate(sizes)]
    return {
        "axes": axes, "groups": groups, "stride": stride, "dilation": dilation, "kernel": kernel, "padding": padding, "extra": extra,
        "transposed": transposed, "sizes": sizes, "inputs": groups * draw(st.integers(1, 3)), "outputs": groups * draw(st.integers(1, 2)),
    }  # fmt: skip


def _function(c: dict):
    forward = FORWARD[c["transposed"]][c["axes"] - 1]

    def run(x, weight, bias):
        if c["transposed"]:
            return forward(x, weight, bias, c["stride"], c["padding"], c["extra"], c["groups"], c["dilation"])
        return forward(x, weight, bias, c["stride"], c["padding"], c["dilation"], c["groups"])

    return run


def _tensors(c: dict, batch: int, sizes: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    channels = (c["inputs"], c["outputs"] // c["groups"]) if c["transposed"] else (c["outputs"], c["inputs"] // c["groups"])
    return [
        torch.randn(batch, c["inputs"], *sizes, dtype=dtype),
        torch.randn(*channels, *c["kernel"], dtype=dtype),
        torch.randn(c["outputs"], dtype=dtype),
    ]


@settings(max_examples=12)
@given(convolutions())
def test_convolution_at_two_batch_sizes(c):
    batches = [_tensors(c, batch, c["sizes"], torch.float64) for batch in (2, 5)]
    check(_function(c), *batches, dynamic=[[0]], gone=["convolution_backward"])


@settings(max_examples=6)
@given(convolutions(), st.integers(0, 3))
def test_convolution_at_two_image_sizes(c, more):
    first = [size + 2 for size in c["sizes"]]  # a size of 1 is no symbol
    batches = [_tensors(c, batch, [size + plus for size in first], torch.float64) for batch, plus in ((2, 0), (3, more))]
    check(_function(c), *batches, dynamic=[[0, *range(2, 2 + c["axes"])]], gone=["convolution_backward"])


def test_convolution_in_float32():
    x, weight, bias = torch.randn(3, 8, 12, 11), torch.randn(6, 8, 3, 3), torch.randn(6)
    check(lambda x, weight, bias: F.conv2d(x, weight, bias, 2, 1), [x, weight, bias], gone=["convolution_backward"])


@settings(max_examples=25)
@given(convolutions())
def test_both_weight_gradients_are_those_of_autograd(c):
    """Only one of them is chosen for a shape."""
    c = {**c, "groups": 1, "transposed": False, "sizes": [d * (k - 1) + 3 for d, k in zip(c["dilation"], c["kernel"], strict=True)]}
    x, weight, _ = _tensors(c, 3, c["sizes"], torch.float64)
    weight.requires_grad_()
    result = _function(c)(x, weight, None)
    gradient = torch.randn_like(result)
    (expected,) = torch.autograd.grad(result, weight, gradient)
    geometry = c["kernel"], c["stride"], c["padding"], c["dilation"]
    torch.testing.assert_close(convolution.weight_gradient_by_slices(x, gradient, *geometry), expected)
    torch.testing.assert_close(convolution.weight_gradient_by_convolution(x, gradient, *geometry, 1), expected)


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, False], [False, False, True]])
def test_only_the_wanted_gradients_are_computed(mask):
    x, weight, gradient = torch.randn(2, 3, 6), torch.randn(4, 3, 3), torch.randn(2, 4, 4)
    result = convolution.convolution_backward(gradient, x, weight, [4], [1], [0], [1], False, [0], 1, mask)
    assert [value is not None for value in result] == mask


def test_large_kernels_do_not_make_large_graphs():
    graph = check(lambda x, weight: F.conv2d(x, weight, None, 4), [torch.randn(2, 3, 32, 32), torch.randn(4, 3, 16, 16)])
    assert len(graph.graph.nodes) < 40
