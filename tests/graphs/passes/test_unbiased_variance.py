"""BatchNorm's running variance as PyTorch computes it."""

from __future__ import annotations

import numpy as np
import onnx
import torch

from torch_ort_ckpt.graphs.passes.unbiased_variance import unbias_variances, unbiased_variances

from .small_graphs import compute, model, node, random, value


def norms(*uses: tuple[str, str, str, str]) -> onnx.ModelProto:
    """BatchNorms in training mode: what each reads, its result, and the old and new variance."""
    ones = np.ones(3, np.float32)
    return model(
        [
            node("BatchNormalization", f"{x} ones zeros mean {old}", f"{y} mean_{y} {new}", training_mode=1, momentum=0.8)
            for x, y, old, new in uses
        ],
        [value("x", ["batch", 3]), value("mean", [3]), value("variance", [3])],
        [value(uses[-1][1], None)],
        {"ones": ones, "zeros": 0 * ones},
    )


def test_the_variance_is_pytorch_s() -> None:
    graph = norms(("x", "y", "variance", "new"))
    outputs = unbiased_variances(graph)
    assert unbias_variances(graph) == 1
    assert [item.name for item in graph.graph.output] == ["y", *outputs.values()]
    x, layer = random(4, 3), torch.nn.BatchNorm1d(3, momentum=0.2)
    layer(torch.from_numpy(x))
    _, found = compute(graph, x=x, mean=np.zeros(3, np.float32), variance=np.ones(3, np.float32))
    np.testing.assert_allclose(found, layer.running_var.numpy(), rtol=1e-5)


def test_a_layer_used_twice_continues_from_its_first_use() -> None:
    graph = norms(("x", "a", "variance", "first"), ("a", "y", "first", "second"))
    assert list(unbiased_variances(graph)) == ["variance"]
    assert unbias_variances(graph) == 2
    x, layer = random(4, 3), torch.nn.BatchNorm1d(3, momentum=0.2)
    layer(layer(torch.from_numpy(x)))
    _, found = compute(graph, x=x, mean=np.zeros(3, np.float32), variance=np.ones(3, np.float32))
    np.testing.assert_allclose(found, layer.running_var.numpy(), rtol=1e-5)


def test_a_graph_without_batch_norm_stays() -> None:
    graph = model([node("Relu", "x", "y")], [value("x", [2])], [value("y", [2])])
    before = graph.SerializeToString()
    assert unbias_variances(graph) == 0
    assert graph.SerializeToString() == before
