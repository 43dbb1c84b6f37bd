"""What merging ranks keeps besides the tensors, and what it refuses: each check has a set of ranks that meets it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torch_ort_ckpt as toc


def two_ranks(**properties: Any) -> list[toc.CheckpointState]:
    """A weight in two flat halves, one that both have, and a frozen one."""
    torch.manual_seed(0)
    weights = {"w": torch.randn(40, 4), "v": torch.randn(3)}
    moments = {name: {"momentum0": value * 2, "momentum1": value * value} for name, value in weights.items()}
    whole = toc.CheckpointState(
        weights,
        {"table": torch.arange(6.0)},
        {"group0": toc.OptimizerGroup(9, 0.5, 0.25, moments, {"eps": 1e-6})},
        {"step": 9, "round": 2, "optimizer_name": "AdamOptimizer", **properties},
    )
    return [rank.clone() for rank in toc.split(whole, {"data_parallel_size": 2})]


def test_properties_that_only_a_later_rank_has_are_kept() -> None:
    first, second = two_ranks(seed=3)
    second.properties["note"] = "of the second"
    merged = toc.merge([second, first])
    assert merged.properties == {"step": 9, "round": 2, "optimizer_name": "AdamOptimizer", "seed": 3, "note": "of the second"}


def test_what_differs_is_the_first_ranks_however_they_are_given() -> None:
    first, second = two_ranks()
    first.properties["seed"], second.properties["seed"] = 1, 2
    for given in ([first, second], [second, first]):
        with pytest.warns(toc.CheckpointWarning, match="differ between ranks.*: seed") as caught:
            assert toc.merge(given).properties["seed"] == 1
        assert len(caught) == 1


@pytest.mark.parametrize("name", ["step", "round", "optimizer_name", "weight_update_step", "mixed_precision"])
def test_ranks_of_another_moment_are_refused(name: str) -> None:
    first, second = two_ranks()
    second.properties[name] = "LambOptimizer" if name == "optimizer_name" else 10
    with pytest.raises(toc.CheckpointError, match="saved at different moments") as caught:
        toc.merge([first, second])
    assert caught.value.field == name
    second.properties.pop(name)
    first.properties.pop(name, None)
    toc.merge([first, second])  # both without it


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("world_size", 8, "world size 8"),
        ("data_parallel_size", 1, "data-parallel size 1"),
        ("horizontal_parallel_size", 2, "horizontal size 2"),
        ("zero_stage", 0, "ZeRO stage 0"),
    ],
)
def test_ranks_of_another_run_are_refused(name: str, value: int, kind: str) -> None:
    first, second = two_ranks()
    first.properties["world_size"] = second.properties["world_size"] = 4  # two stages: leaves room for another horizontal size
    second.properties[name] = value
    with pytest.raises(toc.CheckpointError, match=f"has {kind}, .* belong to different runs"):
        toc.merge([first, second])


@pytest.mark.parametrize("change", [{"lr": 0.5}, {"lr": None}, {"initial_lr": 1.0}, {"hyperparameters": {"eps": 1.0}}])
def test_groups_with_other_rates_are_refused(change: dict[str, Any]) -> None:
    first, second = two_ranks()
    for name, value in change.items():
        setattr(second.optimizer["group0"], name, value)
    with pytest.raises(toc.CheckpointError, match="another learning rate or other hyper-parameters") as caught:
        toc.merge([first, second])
    assert caught.value.field == "optimizer/group0"


def test_the_group_is_as_it_was() -> None:
    group = toc.merge(two_ranks()).optimizer["group0"]
    assert (group.step, group.initial_lr, group.lr, group.hyperparameters) == (9, 0.5, 0.25, {"eps": 1e-6})
    assert sorted(group.states) == ["v", "w"]
    assert all(sorted(moments) == ["momentum0", "momentum1"] for moments in group.states.values())


def test_the_rank_with_the_most_steps_counts() -> None:
    """A weight only the second rank has was updated less often than the group."""
    first, second = two_ranks()
    owner = second if "v" in second.optimizer["group0"].states else first
    owner.optimizer["group0"].states["v"]["step"] = torch.tensor(4)
    merged = toc.merge([first, second]).optimizer["group0"]
    assert merged.step == 9
    assert int(merged.states["v"]["step"]) == 4
    assert "step" not in merged.states["w"]


def _partition(ranks: list[toc.CheckpointState], shape: tuple[int, ...], axis: int) -> None:
    ranks[1].partitions["w"] = toc.PartitionInfo(shape, axis)


def _other_strings(ranks: list[toc.CheckpointState]) -> None:
    for rank, text in zip(ranks, "ab", strict=True):
        rank.frozen["words"] = np.array([text], dtype=object)


def _string_in_one(ranks: list[toc.CheckpointState]) -> None:
    ranks[0].frozen["words"], ranks[1].frozen["words"] = np.array(["a"], dtype=object), torch.ones(1)


def _integer_master(ranks: list[toc.CheckpointState]) -> None:
    for rank in ranks:
        rank.frozen["count"], rank.mixed_precision["count"] = torch.ones(2, dtype=torch.int64), torch.ones(2).half()


def _misshapen_master(ranks: list[toc.CheckpointState]) -> None:
    for rank in ranks:
        rank.frozen["f"], rank.mixed_precision["f"] = torch.ones(3), torch.ones(2).half()


def _half_master(ranks: list[toc.CheckpointState]) -> None:
    for rank in ranks:
        rank.frozen["f"], rank.mixed_precision["f"] = torch.ones(2).half(), torch.ones(2).half()


@pytest.mark.parametrize(
    ("damage", "message", "field"),
    [
        (lambda ranks: _partition(ranks, (4, 40), 0), r"has shape \(4, 40\) cut on axis 0", "w"),
        (lambda ranks: _partition(ranks, (40, 4), 1), r"has shape \(40, 4\) cut on axis 1", "w"),
        (_other_strings, "differs from the ranks before it", "words"),
        (_string_in_one, "others string", "words"),
        (_integer_master, "can't be the master", "count"),
        (_misshapen_master, "can't be the master", "f"),
        (_half_master, "can't be the master", "f"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", None),
)
def test_ranks_that_contradict_each_other_are_refused(damage: Callable[..., None], message: str, field: str) -> None:
    ranks = two_ranks()
    damage(ranks)
    with pytest.raises(toc.CheckpointError, match=message) as caught:
        toc.merge(ranks)
    assert caught.value.field == field
    assert "all ranks of one save" in str(caught.value)


def test_a_shape_below_zero_is_refused() -> None:
    ranks = two_ranks()
    for rank in ranks:
        rank.partitions["w"] = toc.PartitionInfo((-40, 4), -1)
    with pytest.raises(toc.CheckpointError, match=r"has the impossible shape \(-40, 4\)"):
        toc.merge(ranks)


def test_an_alias_without_a_master_becomes_a_frozen_weight() -> None:
    ranks = two_ranks()
    for rank in ranks:
        rank.mixed_precision["alone"] = torch.ones(2).half()
    merged = toc.merge(ranks)
    assert merged.mixed_precision == {}
    (name,) = set(merged.frozen) - {"table"}
    assert name.startswith("alone")
    assert merged.frozen[name].dtype == torch.float16


def test_no_ranks_are_refused() -> None:
    with pytest.raises(toc.CheckpointError, match="Give at least one"):
        toc.merge([])
