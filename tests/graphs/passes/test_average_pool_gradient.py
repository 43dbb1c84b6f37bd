"""AveragePoolGrad written as a transposed convolution, against PyTorch's gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F

from torch_ort_ckpt.graphs.passes.average_pool_gradient import rewrite_average_pool_gradients

from .small_graphs import compute, kinds, model, node, random, value


def gradient(shape: list[int | str], **settings: Any) -> onnx.ModelProto:
    return model(
        [node("AveragePoolGrad", "dy", "dx", domain="com.microsoft", **settings)],
        [value("dy", [None] * len(shape))],
        [value("dx", shape)],
    )


@pytest.mark.parametrize("inside", [0, 1])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_overlapping_windows_and_a_dynamic_batch(rank: int, inside: int) -> None:
    size = [7, 6, 5][:rank]
    settings = {"kernel_shape": [3] * rank, "strides": [2] * rank, "pads": [1] * 2 * rank, "count_include_pad": inside}
    graph = gradient(["batch", 2, *size], **settings)
    assert rewrite_average_pool_gradients(graph) == 1
    assert kinds(graph) == ["Mul", "ConvTranspose"]
    x = torch.from_numpy(random(3, 2, *size)).requires_grad_()
    pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    y = pool(x, 3, 2, 1, count_include_pad=bool(inside))
    dy = torch.from_numpy(random(*y.shape, seed=1))
    y.backward(dy)
    (found,) = compute(graph, dy=dy.numpy())
    np.testing.assert_allclose(found, x.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [[3, 2, 7, 6], ["batch", 2, "height", 6]], ids=["right as it is", "unknown height"])
def test_what_stays(shape: list[int | str]) -> None:
    graph = gradient(shape, kernel_shape=[3, 3], strides=[2, 2])
    assert rewrite_average_pool_gradients(graph) == 0
    assert kinds(graph) == ["AveragePoolGrad"]
