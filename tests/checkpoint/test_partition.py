"""Partitioned sets: merged they are the arrays that were cut, and cutting them again gives the same ranks."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_ort_ckpt as toc
from tests.truth import Truth, fixtures, raw
from torch_ort_ckpt import PartitionPlan
from torch_ort_ckpt.checkpoint.partition import zero_stretch

SETS = [name for name in fixtures("ortcp") + fixtures("ortpt") if isinstance(Truth(name).json["checkpoint"], list)]
checked = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def files(name: str) -> list[Path]:
    return [Truth(name).folder / file for file in Truth(name).json["checkpoint"]]


@pytest.mark.parametrize("name", [name for name in SETS if name.startswith("ortcp")])
def test_merged_sets_are_the_arrays_that_were_cut(name: str) -> None:
    """`parameters` in the truth is ORT's aggregation; where it was wrong, `source_parameters` is what was cut."""
    truth = Truth(name)
    state = toc.load(random.Random(name).sample(files(name), len(files(name))))
    sources = truth.json.get("source_parameters") or {weight: entry["array"] for weight, entry in truth.json["parameters"].items()}
    assert state.trainable.keys() == sources.keys()
    for weight, key in sources.items():
        assert np.array_equal(state.trainable[weight].numpy(), truth.arrays[key])
    moments = truth.json.get("source_moments") or {
        weight: {moment: entry["array"] for moment, entry in values.items()}
        for weight, values in (truth.json["orttrainer"]["optimizer"] or {}).items()
    }
    shared = moments.pop("shared_optimizer_state", {})
    group = state.optimizer["group0"] if moments else toc.OptimizerGroup()
    assert group.states.keys() == moments.keys()
    for weight, keys in moments.items():
        assert np.array_equal(group.states[weight]["momentum0"].numpy(), truth.arrays[keys["Moment_1"]])
        assert np.array_equal(group.states[weight]["momentum1"].numpy(), truth.arrays[keys["Moment_2"]])
        count = keys.get("Update_Count") or shared["Step"]
        assert truth.arrays[count].tolist() == [group.step + 1]
    assert not state.partitions
    assert not {"world_rank", "world_size", "zero_stage"} & state.properties.keys()


def test_ort_s_own_aggregation_was_wrong_where_ours_is_right() -> None:
    truth = Truth("ortcp_ort1_13_1_zero1_megatron_colsplit")
    (weight,) = truth.json["scrambled_by_ort"]
    ours = toc.load(truth.folder).trainable[weight]
    assert raw(ours) == truth.arrays[truth.json["source_parameters"][weight]].tobytes()
    assert raw(ours) != truth.arrays[truth.json["parameters"][weight]["array"]].tobytes()


@pytest.mark.parametrize("name", SETS)
def test_a_list_a_folder_and_a_glob_are_the_same_set(name: str) -> None:
    folder = Truth(name).folder
    whole = toc.load(files(name))
    assert toc.load(folder) == whole
    assert toc.load(f"{folder}/*.{'ortcp' if name.startswith('ortcp') else 'pt'}") == whole
    assert toc.merge([toc.load(file) for file in reversed(files(name))]) == whole
    assert toc.detect(folder) == name.partition("_")[0]


@pytest.mark.parametrize("name", SETS)
def test_cutting_the_merged_set_gives_the_ranks_again(name: str) -> None:
    ranks = [toc.load(file) for file in files(name)]
    assert toc.split(toc.merge(ranks), PartitionPlan.of(ranks)) == ranks


@pytest.mark.parametrize("kind", ["fp32", "mixed"])
def test_a_set_of_four_loads_on_two(kind: str, tmp_path: Path) -> None:
    whole = toc.load(Truth(f"ortcp_ort1_13_1_zero1_d4_lamb_{kind}").folder)
    two = toc.split(whole, {"data_parallel_size": 2})
    for rank in two:
        toc.save(rank, tmp_path / f"rank_{rank.properties['world_rank']}.ortcp", format="ortcp")
    assert [rank.properties["world_size"] for rank in two] == [2, 2]
    assert toc.load(tmp_path) == whole


@pytest.mark.parametrize("format", ["ort", "pbseq", "runner", "ortcp", "safetensors", "torch"])
@pytest.mark.parametrize(
    "plan", [{"data_parallel_size": 3}, {"data_parallel_size": 2, "horizontal_parallel_size": 2, "columns": ["w"], "rows": ["v"]}]
)
def test_rank_sets_go_through_every_format(format: str, plan: dict[str, Any], tmp_path: Path) -> None:
    whole = model(mixed=True)
    ranks = toc.split(whole, plan)
    for rank in ranks:
        toc.save(rank, tmp_path / f"{rank.properties['world_rank']}", format=format, include_mixed_precision=True)
    assert [toc.load(tmp_path / str(number)) for number in range(len(ranks))] == ranks
    assert toc.load(tmp_path) == whole


def model(mixed: bool = False, frozen: bool = True) -> toc.CheckpointState:
    generator = torch.Generator().manual_seed(7)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weights = {"w": tensor(6, 8), "v": tensor(4, 5), "b": tensor(8), "scale": tensor(), "cube": tensor(2, 3, 4), "none": tensor(0, 2)}
    moments = {name: {"momentum0": value * 0.1, "momentum1": value * value} for name, value in weights.items()}
    moments["v"]["step"] = torch.tensor(3)
    return toc.CheckpointState(
        weights,
        {"table": tensor(3, 2), "words": np.array(["a", "b"], dtype=object)} if frozen and not mixed else {},
        {"group0": toc.OptimizerGroup(9, states=moments)},
        {"mixed_precision": int(mixed), "optimizer_name": "AdamOptimizer", "step": 9, "weight_update_step": 9},
        {name: value.half() for name, value in weights.items()} if mixed else {},
    )


@st.composite
def plans(draw: st.DrawFn) -> PartitionPlan:
    horizontal = draw(st.sampled_from([1, 2]))
    cuttable = ["w", "v", "b", "cube"]
    columns = [name for name in cuttable if name != "v" and draw(st.booleans())]  # v has five columns
    rows = [name for name in cuttable if name not in columns and draw(st.booleans())]
    names = list(model().parameters)
    stages: tuple[tuple[str, ...], ...] = ()
    if draw(st.booleans()):
        chosen = [draw(st.integers(0, 1)) for _ in names]
        stages = tuple(tuple(name for name, stage in zip(names, chosen, strict=True) if stage == number) for number in (0, 1))
        if draw(st.booleans()):
            stages = (tuple({*stages[0], "w"}), tuple({*stages[1], "w"}))  # tied: in both stages
    order = draw(st.permutations([name for name in names if name in model().trainable]))
    return PartitionPlan(
        draw(st.integers(1, 5)),
        horizontal,
        draw(st.sampled_from([None, 0, 1])),
        tuple(columns),
        tuple(rows),
        stages,
        draw(st.booleans()),
        tuple(order),
    )


@given(plan=plans(), aliases=st.booleans(), seed=st.integers(0, 99))
@checked
def test_any_plan_can_be_undone(plan: PartitionPlan, aliases: bool, seed: int) -> None:
    whole = model()
    whole.properties["mixed_precision"] = int(bool(plan.mixed_precision))
    if aliases:
        whole.mixed_precision = {name: value.half() for name, value in whole.trainable.items()}
    ranks = toc.split(whole, plan)
    assert len(ranks) == plan.world_size
    merged = toc.merge(random.Random(seed).sample(ranks, len(ranks)))
    assert merged == whole
    if not plan.stages or not set(plan.stages[0]) & set(plan.stages[1]):  # one order can't always be that of two stages
        assert toc.split(merged, PartitionPlan.of(ranks)) == ranks


def test_zero_pads_by_at_least_one_element() -> None:
    assert zero_stretch(680, 4) == 192  # as in the fixtures
    assert zero_stretch(63, 2) == 32
    assert zero_stretch(64, 2) == 64


def test_pipeline_stages_that_do_not_say_their_place_are_taken_in_order() -> None:
    whole = model()
    stages = toc.split(whole, {"stages": [["w", "v", "table"], ["b", "scale", "cube", "none", "words"]]})
    for stage in stages:
        for name in [name for name in stage.properties if name.startswith(("world", "data", "horizontal", "zero"))]:
            del stage.properties[name]
    with pytest.raises(toc.CheckpointError, match="world_rank"):
        toc.merge(stages)
    assert toc.merge(stages, stages=True) == whole


def ranks_of(plan: dict[str, Any]) -> list[toc.CheckpointState]:
    return [rank.clone() for rank in toc.split(model(), plan)]


GRID = {"data_parallel_size": 2, "horizontal_parallel_size": 2, "columns": ["w"], "rows": ["v"]}


def test_a_missing_rank_is_named() -> None:
    with pytest.raises(toc.CheckpointError, match=r"rank 1, 2 of 4 is missing"):
        toc.merge([rank for rank in ranks_of(GRID) if rank.properties["world_rank"] in (0, 3)])


def test_a_rank_that_is_there_twice_is_named() -> None:
    ranks = ranks_of(GRID)
    with pytest.raises(toc.CheckpointError, match=r"rank 2 \(state 4\) and rank 2 \(state 2\)"):
        toc.merge([*ranks, ranks[2]])


def test_a_rank_of_another_run_is_named() -> None:
    ranks = ranks_of(GRID)
    for name, value in (
        ("world_size", 8),
        ("data_parallel_size", 1),
        ("zero_stage", 0),
        ("weight_update_step", 10),
        ("optimizer_name", "X"),
    ):
        foreign = ranks[1].clone()
        foreign.properties[name] = value
        with pytest.raises(toc.CheckpointError, match="rank 1"):
            toc.merge([ranks[0], foreign, *ranks[2:]])


def test_replicas_that_disagree_are_named_with_their_weight() -> None:
    for weight in ("b", "w", "table"):  # b is on all ranks, w on two, table frozen
        ranks = ranks_of(GRID)
        home = ranks[3].trainable if weight in ranks[3].trainable else ranks[3].frozen
        home[weight].view(torch.int32).view(-1)[0] ^= 1
        with pytest.raises(toc.CheckpointError, match="rank 3") as caught:
            toc.merge(ranks)
        assert caught.value.field == weight


def test_moments_and_aliases_that_disagree_are_named() -> None:
    ranks = [rank.clone() for rank in toc.split(model(mixed=True), {"horizontal_parallel_size": 2})]
    ranks[1].optimizer["group0"].states["b"]["momentum1"][0] += 1
    with pytest.raises(toc.CheckpointError, match=r"rank 1 .*momentum1") as caught:
        toc.merge(ranks)
    assert caught.value.field == "b"
    ranks = [rank.clone() for rank in toc.split(model(mixed=True), {"data_parallel_size": 2})]
    ranks[1].mixed_precision["w"][0, 0] += 1
    with pytest.raises(toc.CheckpointError, match=r"rank 1 .*alias") as caught:
        toc.merge(ranks)
    assert caught.value.field == "w"


def test_a_weight_counted_differently_is_named() -> None:
    ranks = [rank.clone() for rank in toc.split(model(), {"horizontal_parallel_size": 2})]
    ranks[1].optimizer["group0"].states["b"]["step"] = torch.tensor(5)
    with pytest.raises(toc.CheckpointError, match=r"rank 1 .*updated it 5 times") as caught:
        toc.merge(ranks)
    assert caught.value.field == "b"


def test_pieces_that_do_not_make_a_whole_are_named() -> None:
    def lost(ranks: list[toc.CheckpointState]) -> None:
        del ranks[0].optimizer["group0"].states[next(iter(ranks[0].partitions))]["momentum0"]

    def short(ranks: list[toc.CheckpointState]) -> None:
        states = ranks[0].optimizer["group0"].states[next(iter(ranks[0].partitions))]
        states["momentum0"] = states["momentum0"][:-1]

    def misshapen(ranks: list[toc.CheckpointState]) -> None:
        ranks[1].trainable["w"] = torch.ones(7, 7)

    def typed(ranks: list[toc.CheckpointState]) -> None:
        ranks[1].trainable["w"] = ranks[1].trainable["w"].double()

    def column_gone(ranks: list[toc.CheckpointState]) -> None:
        del ranks[1].trainable["w"], ranks[3].trainable["w"]

    for plan, damage, what in (
        ({"data_parallel_size": 2}, lost, "pieces of"),
        ({"data_parallel_size": 2}, short, "pieces of"),
        ({"data_parallel_size": 2}, misshapen, "rank 1"),
        ({"data_parallel_size": 2}, typed, "rank 1"),
        (GRID, column_gone, "horizontal rank 1"),
    ):
        ranks = ranks_of(plan)
        damage(ranks)
        with pytest.raises(toc.CheckpointError, match=what) as caught:
            toc.merge(ranks)
        assert caught.value.field in ("w", "v", "cube")


def test_properties_that_differ_are_kept_from_the_first_rank_with_a_warning() -> None:
    ranks = ranks_of({"data_parallel_size": 2})
    ranks[1].properties["seed"], ranks[0].properties["seed"] = 2, 1
    with pytest.warns(toc.CheckpointWarning, match="seed"):
        assert toc.merge(ranks).properties["seed"] == 1


@pytest.mark.parametrize(
    "plan",
    [
        {"data_parallel_size": 0},
        {"zero_stage": 3},
        {"columns": ["w"], "rows": ["w"]},
        {"nonsense": 1},
        {"columns": 3},
        {"horizontal_parallel_size": 3, "columns": ["w"]},
        {"horizontal_parallel_size": 2, "columns": ["scale"]},
        {"horizontal_parallel_size": 2, "columns": ["nobody"]},
        {"stages": [["w"], ["v"]]},
    ],
)
def test_a_plan_that_can_not_be_followed_is_refused(plan: dict[str, Any]) -> None:
    with pytest.raises(toc.CheckpointError):
        toc.split(model(), plan)


def test_a_rank_is_not_cut_again() -> None:
    with pytest.raises(toc.CheckpointError, match="one rank of a set"):
        toc.split(ranks_of(GRID)[0], {"data_parallel_size": 2})


@pytest.mark.posix  # measured by `resource`
def test_merging_takes_the_memory_of_the_model_and_one_rank(tmp_path: Path) -> None:
    """64 MiB in 8 ranks: the peak beyond the merged model stays near one rank's files, not all of them."""
    weights = {f"w{n}": torch.randn(1 << 20) for n in range(16)}
    for rank in toc.split(toc.CheckpointState(weights, properties={"mixed_precision": 1}), {"data_parallel_size": 8}):
        toc.save(rank, tmp_path / f"{rank.properties['world_rank']}", durable=False)
    code = (
        "import resource, sys, torch, torch_ort_ckpt as toc\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"state = toc.load({os.fspath(tmp_path)!r}, mmap=False)\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(after - before, sum(value.nbytes for value in state.trainable.values()) >> 10)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    taken, merged = map(int, done.stdout.split())
    assert merged == 64 << 10
    assert taken < merged + 3 * (merged // 8)
