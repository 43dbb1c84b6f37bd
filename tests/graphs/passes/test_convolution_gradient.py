"""ConvGrad, run by ORT after the pass, against PyTorch's gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F

from torch_ort_ckpt.graphs.passes.convolution_gradient import rewrite_convolution_gradients

from .small_graphs import compute_by_ort, kinds, model, node, random, value


def gradient(rank: int, size: list[int | str], **settings: Any) -> onnx.ModelProto:
    """ConvGrad of a convolution of 4 channels in 2 groups, kernel 2."""
    return model(
        [node("ConvGrad", "dy x w", "dx dw db", domain="com.microsoft", **settings)],
        [value("dy", ["batch", 4, *["?"] * rank]), value("x", ["batch", 4, *size]), value("w", [4, 4 // settings["group"], *[2] * rank])],
        [value("dx", None), value("dw", None), value("db", None)],
    )


@pytest.mark.ort
@pytest.mark.parametrize(("rank", "kind"), [(1, "Reshape"), (3, "Split")])
def test_convolutions_in_groups(rank: int, kind: str) -> None:
    graph = gradient(rank, [5] * rank, group=2, pads=[1, 0] * rank if rank == 1 else [1] * 2 * rank, strides=[2] * rank)
    assert rewrite_convolution_gradients(graph) == 1
    assert kinds(graph)[0] == kind
    x, w, b = (torch.from_numpy(random(*shape)).requires_grad_() for shape in ((2, 4, *[5] * rank), (4, 2, *[2] * rank), (4,)))
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    y = convolve(F.pad(x, (1, 0)) if rank == 1 else F.pad(x, (1, 1) * rank), w, b, stride=2, groups=2)
    dy = torch.from_numpy(random(*y.shape, seed=1))
    y.backward(dy)
    found = compute_by_ort(graph, dy=dy.numpy(), x=x.detach().numpy(), w=w.detach().numpy())
    for ours, theirs in zip(found, (x.grad, w.grad, b.grad), strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-5)


def test_automatic_padding_is_written_out() -> None:
    graph = gradient(2, [5, 6], group=1, auto_pad="SAME_UPPER")
    assert rewrite_convolution_gradients(graph) == 1
    found = {item.name: onnx.helper.get_attribute_value(item) for item in graph.graph.node[0].attribute}
    assert found["pads"] == [0, 0, 1, 1]
    assert "auto_pad" not in found


@pytest.mark.parametrize("settings", [{"group": 2}, {"group": 1, "pads": [1, 1, 1, 1]}])
def test_what_the_kernel_computes_right_stays(settings: dict[str, Any]) -> None:
    graph = gradient(2, [5, 6], **settings)
    before = graph.SerializeToString()
    assert rewrite_convolution_gradients(graph) == 0
    assert graph.SerializeToString() == before


def test_automatic_padding_of_an_unknown_size_stays() -> None:
    graph = gradient(2, ["height", 6], group=1, auto_pad="SAME_UPPER")
    assert rewrite_convolution_gradients(graph) == 0
