"""BatchNormalization in training mode, made to use its running statistics."""

from __future__ import annotations

import numpy as np

from torch_ort_ckpt.graphs.passes.running_statistics import use_running_statistics

from .small_graphs import compute, model, node, random, value


def test_the_running_statistics_are_used() -> None:
    ones, mean, variance = np.ones(3, np.float32), random(3, seed=1), np.abs(random(3, seed=2))
    graph = model(
        [node("BatchNormalization", "x ones zeros mean variance", "y m v", training_mode=1, epsilon=0.0)],
        [value("x", [4, 3])],
        [value("y", None)],
        {"ones": ones, "zeros": 0 * ones, "mean": mean, "variance": variance},
    )
    assert use_running_statistics(graph) == 1
    x = random(4, 3)
    np.testing.assert_allclose(compute(graph, x=x)[0], (x - mean) / np.sqrt(variance), rtol=1e-5, atol=1e-6)
