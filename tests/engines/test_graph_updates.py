"""The optimizer graph on PyTorch's memory: kept sequences against lists made anew in every step, which is ORT's own way."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.truth import DATA

pytestmark = pytest.mark.ort

ADAMW = DATA / "fbv2_ort1_19_2_adamw_full"
SHAPES = [(3, 5), (7,), (), (2, 0), (1, 2, 3, 4), (33,)]


def tensors(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = {name: [torch.randn(shape, generator=generator) for shape in shapes] for name in ("parameters", "gradients", "first", "second")}
    made["second"] = [value.abs() for value in made["second"]]
    return made


def update(values: dict[str, list[torch.Tensor]], step: int, lr: float = 0.01) -> Any:
    from torch_ort_ckpt.engines.updates import Update

    return Update(**values, step=step, lr=lr, hyperparameters=toc.Artifacts.load(ADAMW).optimizer_spec)


def runs() -> tuple[Any, Any]:
    from torch_ort_ckpt.engines import EngineOptions
    from torch_ort_ckpt.engines.ort.graph_updates import ListRun, SequenceRun
    from torch_ort_ckpt.engines.ort.sessions import make_session

    path = str(toc.Artifacts.load(ADAMW).optimizer_path)
    return SequenceRun(make_session(path, EngineOptions(threads=1))), ListRun(make_session(path, EngineOptions(threads=1)))


def same(left: dict[str, list[torch.Tensor]], right: dict[str, list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for name in left for a, b in zip(left[name], right[name], strict=True))


def test_kept_sequences_equal_lists_bit_for_bit() -> None:
    sequences, lists = runs()
    left, right = tensors(0), tensors(0)
    for step in range(1, 6):
        lr = 0.1 / step
        assert sequences.apply(update(left, step, lr))
        assert lists.apply(update(right, step, lr))
        assert same(left, right)
        assert math.isfinite(float(left["parameters"][0].sum()))
    assert not torch.equal(left["parameters"][0], tensors(0)["parameters"][0])


def test_tensors_that_moved_are_followed() -> None:
    sequences, lists = runs()
    left, right = tensors(1), tensors(1)
    for step in range(1, 10):
        for name in ("gradients", "parameters", "first"):
            left[name][step % 3] = left[name][step % 3].clone()
        gc.collect()
        sequences.apply(update(left, step))
        lists.apply(update(right, step))
        assert same(left, right)


def test_a_subset_of_the_parameters_and_all_again() -> None:
    sequences, lists = runs()
    left, right = tensors(2), tensors(2)
    for step, chosen in enumerate([slice(None), slice(1, 3), slice(None), slice(2, None)], 1):
        sequences.apply(update({name: values[chosen] for name, values in left.items()}, step))
        lists.apply(update({name: values[chosen] for name, values in right.items()}, step))
        assert same(left, right)


@pytest.mark.parametrize("which", [0, 1])
def test_tensors_side_by_side_are_updated_as_one_bit_for_bit(which: int) -> None:
    from torch_ort_ckpt.engines.ort.memory import side_by_side

    run, fresh = runs()[which], runs()[1]
    shapes = [*SHAPES, (4, 4), (32,), (10, 16), (7,)]
    right = tensors(5, shapes)
    left = {name: [place.copy_(value) for place, value in zip(side_by_side(shapes), values, strict=True)] for name, values in right.items()}
    for step, chosen in enumerate([slice(None), slice(None), slice(1, 4), slice(0, 10, 2), slice(5, None), slice(None)], 1):
        run.apply(update({name: values[chosen] for name, values in left.items()}, step))
        fresh.apply(update({name: values[chosen] for name, values in right.items()}, step))
        assert same(left, right)


@pytest.mark.parametrize("which", [0, 1])
def test_memory_of_a_gradient_may_be_another_s_in_the_next_step(which: int) -> None:
    """The same two addresses, once the gradients of 15 and 7 elements, then those of 7 and 33."""
    run, fresh = runs()[which], runs()[1]
    left, right, memory = tensors(4), tensors(4), torch.randn(128)
    for step, (chosen, sizes) in enumerate([((0, 1), (15, 7)), ((1, 5), (7, 33))], 1):
        for one, values in ((run, left), (fresh, right)):
            picked = {name: [values[name][index] for index in chosen] for name in ("parameters", "first", "second")}
            pieces = [memory[start : start + size].view(SHAPES[index]) for start, size, index in zip((0, 64), sizes, chosen, strict=True)]
            picked["gradients"] = pieces if one is run else [piece.clone() for piece in pieces]
            one.apply(update(picked, step))
    assert same(left, right)


@pytest.mark.parametrize("which", [0, 1])
def test_what_the_graph_can_not_take_is_refused_also_after_it_was_bound(which: int) -> None:
    run = runs()[which]
    values = tensors(3)
    run.apply(update(values, 1))
    before = [value.clone() for value in values["parameters"]]
    for wrong in (values["parameters"][0].t(), values["parameters"][0].double()):
        with pytest.raises(toc.CheckpointError, match="fused=True"):
            run.apply(update({**values, "parameters": [wrong, *values["parameters"][1:]]}, 2))
    assert all(torch.equal(a, b) for a, b in zip(before, values["parameters"], strict=True))
    run.apply(update(values, 2))


def test_sequences_are_released() -> None:
    import psutil

    from torch_ort_ckpt.engines.ort.sequences import make_sequence

    memory = torch.zeros(4)
    values = [(memory.data_ptr(), 4)] * 100
    process = psutil.Process()
    for _ in range(200):
        make_sequence(values)
    before = process.memory_info().rss
    for _ in range(2000):  # 200,000 tensors: tens of megabytes if they were kept
        make_sequence(values)
    assert process.memory_info().rss - before < 8 << 20
    assert make_sequence(values).is_tensor_sequence()


def test_another_release_gets_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    from torch_ort_ckpt.engines import EngineOptions
    from torch_ort_ckpt.engines.ort import sequences
    from torch_ort_ckpt.engines.ort.graph_updates import GraphUpdater, ListRun, SequenceRun

    artifacts = toc.Artifacts.load(ADAMW)
    assert isinstance(GraphUpdater(artifacts, EngineOptions())._default, SequenceRun)
    sequences._api.cache_clear()
    monkeypatch.setattr(onnxruntime, "__version__", "1.18.0")
    try:
        assert not sequences.available()
        assert isinstance(GraphUpdater(artifacts, EngineOptions())._default, ListRun)
        with pytest.raises(toc.CheckpointError, match="can't be made"):
            sequences.make_sequence([(0, 1)])
    finally:
        sequences._api.cache_clear()
