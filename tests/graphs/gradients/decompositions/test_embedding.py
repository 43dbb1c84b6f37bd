"""EmbeddingBag and Embedding against autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ort_ckpt.graphs.gradients.decompositions.embedding import embedding_bag

from .agreement import check, operators, trace

GONE = ["_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_backward", "_embedding_bag_dense_backward"]
MODES = ["sum", "mean", "max"]
bags = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=2, max_size=5).filter(lambda rows: sum(map(len, rows)) > 1)


def _flat(rows: list[list[int]], with_end: bool) -> list[torch.Tensor]:
    starts = [sum(map(len, rows[:i])) for i in range(len(rows) + 1)]
    return [torch.tensor([index for row in rows for index in row]), torch.tensor(starts if with_end else starts[:-1])]


@settings(max_examples=20)
@given(bags, bags, st.sampled_from(MODES), st.booleans(), st.sampled_from([None, 0, 3]))
def test_bags_of_any_size(first, second, mode, with_end, padding):
    """Empty bags too, and another number of bags and indices than in the example."""
    batches = [[*_flat(rows, with_end), torch.randn(10, 3, dtype=torch.float64)] for rows in (first, second)]

    def run(indices, offsets, weight):
        return F.embedding_bag(indices, weight, offsets, mode=mode, include_last_offset=with_end, padding_idx=padding)

    check(run, *batches, dynamic=[[0], [0]], gone=GONE)


def test_weights_for_each_index_get_a_gradient():
    batches = [[torch.randint(0, 10, (n, 3)), torch.randn(10, 4), torch.randn(n, 3)] for n in (2, 5)]
    check(lambda i, w, p: F.embedding_bag(i, w, mode="sum", per_sample_weights=p), *batches, dynamic=[[0], [], [0]], gone=GONE)


@pytest.mark.parametrize("mode", MODES)
def test_all_results_but_the_last_are_pytorchs(mode):
    weight, indices, offsets = torch.randn(10, 3), torch.tensor([1, 2, 2, 5, 9]), torch.tensor([0, 2, 2])
    ours = embedding_bag(weight, indices, offsets, mode=MODES.index(mode))
    theirs = torch.ops.aten.embedding_bag.padding_idx(weight, indices, offsets, False, MODES.index(mode), False, None, False, None)
    torch.testing.assert_close(ours[0], theirs[0])
    if mode == "mean":  # others leave them empty
        torch.testing.assert_close(ours[1], theirs[1])
        torch.testing.assert_close(ours[2], theirs[2])


def test_scaling_by_frequency_stays_an_operator_that_is_refused():
    indices = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 3, 3, 6])
    graph = trace(lambda i, o, w: F.embedding_bag(i, w, o, mode="sum", scale_grad_by_freq=True), [*indices, torch.randn(10, 3)])
    assert any(name.startswith("_embedding_bag") for name in operators(graph))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}])
def test_embedding(options):
    batches = [[torch.randint(0, 6, (n, 4)), torch.randn(6, 3)] for n in (2, 5)]
    check(lambda i, w: F.embedding(i, w, **options), *batches, dynamic=[[0]], gone=["embedding_dense_backward"])
