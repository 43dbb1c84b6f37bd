"""InstanceNormalization written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torch_ort_ckpt.graphs.passes.instance_norm import decompose_instance_norm

from .small_graphs import compute, kinds, model, node, random, value


@pytest.mark.parametrize("opset", [15, 18])
@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 4, 5)])
def test_the_result_is_pytorch_s(shape: tuple[int, ...], opset: int) -> None:
    scale, shift, x = random(3, seed=1), random(3, seed=2), random(*shape)
    graph = model(
        [node("InstanceNormalization", "x scale shift", "y", epsilon=0.1)],
        [value("x", ["batch", *shape[1:]])],
        [value("y", None)],
        {"scale": scale, "shift": shift},
        opset=opset,
    )
    assert decompose_instance_norm(graph) == 1
    assert "InstanceNormalization" not in kinds(graph)
    expected = torch.nn.functional.instance_norm(
        *map(torch.from_numpy, (x,)), weight=torch.from_numpy(scale), bias=torch.from_numpy(shift), eps=0.1
    )
    np.testing.assert_allclose(compute(graph, x=x)[0], expected.numpy(), rtol=1e-5, atol=1e-6)


def test_an_unknown_rank_leaves_the_node() -> None:
    graph = model(
        [node("InstanceNormalization", "x scale scale", "y")], [value("x", None)], [value("y", None)], {"scale": np.ones(3, np.float32)}
    )
    assert decompose_instance_norm(graph) == 0
    assert kinds(graph) == ["InstanceNormalization"]
