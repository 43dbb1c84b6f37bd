"""The gradients of artifacts that are already there, built again by PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_ort_ckpt as toc
from tests.models import exported
from torch_ort_ckpt.graphs.gradients.example_batch import batch_of, open_sizes
from torch_ort_ckpt.graphs.gradients.rebuild import rebuilt

DATA = Path(__file__).parents[2] / "data"
RECORDED = ("fbv1_ort1_16_3_adamw_full", "fbv1_ort1_17_3_adamw_full", "fbv2_ort1_18_0_adamw_full", "fbv2_ort1_19_2_adamw_full")


@pytest.mark.parametrize("fixture", RECORDED)
def test_names_and_sizes_of_recorded_artifacts_are_kept(fixture: str) -> None:
    source = toc.Artifacts.load(DATA / fixture)
    found = rebuilt(source)
    assert found.graph.inputs == [spec.name for spec in source.inputs]
    assert [found.graph.loss, *found.graph.extras] == [spec.name for spec in source.outputs]
    assert list(found.graph.gradients) == source.trainable
    declared = {value.name: value for value in found.graph.model.graph.input}
    for spec in source.inputs:
        sizes = [size.dim_param or size.dim_value for size in declared[spec.name].type.tensor_type.shape.dim]
        assert sizes == list(spec.shape or ())
    assert all(node.domain in ("", "ai.onnx") for node in found.graph.model.graph.node)


@pytest.mark.ort
def test_buffers_and_counters_of_artifacts_made_by_onnx_runtime_are_kept() -> None:
    source = exported("cnn", builder="ort")
    found = rebuilt(source)
    assert set(found.graph.updates) == {f"norm{i}.running_{kind}" for i in (1, 2) for kind in ("mean", "var")}
    counters = next(item.value for item in found.graph.model.metadata_props if item.key == "torch_ort_ckpt.counters")
    assert json.loads(counters) == {"norm1.num_batches_tracked": 1, "norm2.num_batches_tracked": 1}


def spec(name: str, dtype: torch.dtype, *shape: int | str) -> Any:
    from torch_ort_ckpt.graphs.description import TensorSpec

    return TensorSpec(name, dtype, shape)


class Pairs(torch.nn.Module):
    """Takes inputs whose dimensions must be equal though they have different names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return (x + y.unsqueeze(1)).sum()


def test_a_batch_has_equal_sizes_where_the_graph_needs_them() -> None:
    module = Pairs()
    x, y = batch_of([spec("x", torch.float32, "n", 3), spec("y", torch.int64, "m")], module)
    assert x.shape[0] == y.shape[0]
    assert x.shape[1] == 3
    assert torch.equal(module.seen, torch.zeros(3))
    np.testing.assert_array_equal(y.numpy(), 0)


def test_a_size_that_is_a_term_of_others_is_computed() -> None:
    x, y = batch_of([spec("x", torch.float32, "n", 2), spec("y", torch.float32, "2*n + 1")], _Term())
    assert y.shape[0] == 2 * x.shape[0] + 1


class _Term(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.flatten(), x.new_zeros(1)]) + y


def test_dimensions_without_a_name_get_one() -> None:
    assert open_sizes([spec("x", torch.float32, "?", 4, "?")]) == {"x": {0: "x_axis0", 2: "x_axis2"}}


def test_a_graph_that_takes_no_batch_of_ours_is_refused() -> None:
    class Picky(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(3, 1001).sum()

    with pytest.raises(toc.CheckpointError, match="example_inputs"):
        batch_of([spec("x", torch.float32, "n")], Picky())
