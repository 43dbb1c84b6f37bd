"""Tensors that are adjacent in memory, and which of them are passed to ORT as one."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_ort_ckpt as toc
from torch_ort_ckpt.engines.ort.memory import layout, pieces, side_by_side, zeros_like_all

shapes = st.lists(st.lists(st.integers(0, 20), max_size=3).map(tuple), max_size=12)


@given(shapes)
def test_a_layout_leaves_no_two_tensors_on_the_same_memory(found: list[tuple[int, ...]]) -> None:
    kinds = [(dtype, shape) for shape in found for dtype in (torch.float32, torch.float16)]
    starts, sizes = layout(kinds)
    for kind in {dtype for dtype, _ in kinds}:
        spans = sorted((start, start + math.prod(shape)) for start, (dtype, shape) in zip(starts, kinds, strict=True) if dtype is kind)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= sizes[kind]
        assert all(start * kind.itemsize % 64 == 0 for start, _ in spans)


@given(shapes)
def test_side_by_side_has_storages_of_their_own_and_whole_lines_are_one_piece(found: list[tuple[int, ...]]) -> None:
    made = side_by_side(found)
    assert [tuple(tensor.shape) for tensor in made] == found
    filled = [tensor for tensor in made if tensor.numel()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in filled}) == len(filled)
    assert all(tensor.untyped_storage().nbytes() == 4 * tensor.numel() and not tensor.any() for tensor in made)
    lists = [[tensor.data_ptr() for tensor in values] for values in (made, zeros_like_all(made))]
    sizes = [tensor.numel() for tensor in made]
    joined = pieces(lists, sizes, join=True)
    whole = [size for size in sizes if size and size % 16 == 0]
    odd = [size for size in sizes if size % 16]
    if filled:
        counts = [[count for _, count in own] for own in joined]
        assert counts[0] == counts[1]
        assert sum(counts[0]) == sum(sizes)
        assert len(counts[0]) == (len(odd) or 1)
        assert counts[0][0] - sum(whole) in (0, *odd)
    assert pieces(lists, sizes, join=False) == [list(zip(own, sizes, strict=True)) for own in lists]


@given(st.lists(st.tuples(st.sampled_from([0, 1, 5, 16, 32]), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=10))
def test_pieces_cover_each_tensor_once_and_only_where_every_list_goes_on(found: list[tuple[int, int, int]]) -> None:
    """Sizes, and the gap behind each tensor in two memory layouts."""
    sizes = [size for size, *_ in found]
    lists = []
    for which in (1, 2):
        address, places = 1000 * which, []
        for entry in found:
            places.append(address)
            address += 4 * entry[0] + 4 * entry[which]
        lists.append(places)
    elements = [
        [(address + 4 * number) for own in pieces(lists, sizes, join=True)[which] for address, count in [own] for number in range(count)]
        for which in (0, 1)
    ]
    assert all(count % 16 in (0, 1, 5) for own in pieces(lists, sizes, join=True) for _, count in own)
    expected = [[place + 4 * number for place, size in zip(places, sizes, strict=True) for number in range(size)] for places in lists]
    assert elements == expected


@pytest.mark.ort
def test_a_model_s_update_is_one_piece_and_stays_so_through_checkpoints(tmp_path: Path) -> None:
    def joined(model: toc.OrtModule, optimizer: toc.OrtOptimizer) -> list[int]:
        model.train_step(torch.randn(4, 8), torch.randint(0, 3, (4,)))
        optimizer.step()
        model.lazy_reset_grad()
        parameters = optimizer.param_groups[0]["params"]
        moments = [[optimizer.state[parameter][name] for parameter in parameters] for name in ("exp_avg", "exp_avg_sq")]
        lists = [[tensor.data_ptr() for tensor in values] for values in (parameters, [value.grad for value in parameters], *moments)]
        return [count for _, count in pieces(lists, [parameter.numel() for parameter in parameters], join=True)[0]]

    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    artifacts = toc.export_artifacts(module, (torch.randn(4, 8),), tmp_path, exporter="torchscript")
    whole = [8 * 16 + 16 + 16 * 3 + 3]
    model = toc.OrtModule(artifacts)
    optimizer = toc.OrtOptimizer(model)
    assert joined(model, optimizer) == whole
    optimizer.load_state_dict(optimizer.state_dict())
    assert joined(model, optimizer) == whole
    toc.save(model.checkpoint(optimizer), tmp_path / "later")
    model.load_checkpoint(tmp_path / "later", optimizer)
    assert joined(model, optimizer) == whole
    safetensors.torch.save_file(model.state_dict(), tmp_path / "weights.safetensors")  # refuses tensors that share a storage
    saved = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


class Marked(torch.Tensor):
    """A tensor of another class, as DTensors are."""


@pytest.mark.parametrize(
    "odd",
    [torch.ones(3, dtype=torch.float64), torch.ones(3, device="meta"), torch.ones(3).as_subclass(Marked)],
    ids=["another type", "another device", "another class"],
)
def test_zeros_for_tensors_that_are_not_plain_are_those_of_pytorch(odd: torch.Tensor) -> None:
    found = zeros_like_all([torch.ones(2), odd])
    for zeros, like in zip(found, [torch.ones(2), odd], strict=True):
        assert (type(zeros), zeros.dtype, zeros.device, zeros.shape) == (type(like), like.dtype, like.device, like.shape)
    assert found[0].untyped_storage().nbytes() == 8  # memory of its own
