"""BatchNormalization outside training mode."""

from __future__ import annotations

from torch_ort_ckpt.graphs.passes.single_batch_norm_outputs import single_batch_norm_outputs

from .small_graphs import model, node, value


def test_more_outputs_are_removed_outside_training_mode_only() -> None:
    nodes = [
        node("BatchNormalization", "x s b m v", "y m1 v1", training_mode=0),
        node("BatchNormalization", "x s b m v", "z m2 v2", training_mode=1),
    ]
    graph = model(nodes, [value("x", [2, 3])], [value("y", None), value("z", None)])
    assert single_batch_norm_outputs(graph) == 1
    assert [list(item.output) for item in graph.graph.node] == [["y"], ["z", "m2", "v2"]]
