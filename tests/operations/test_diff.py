"""`diff` tells which side has what, and every number of its report is the one of its side."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_ort_ckpt as toc


def words(*texts: str) -> Any:
    array = np.empty(len(texts), dtype=object)
    array[:] = texts
    return array


def sides() -> tuple[toc.CheckpointState, toc.CheckpointState]:
    """Two states that differ in everything that a state holds, and have each something the other lacks."""
    a = toc.CheckpointState(
        trainable={"w": torch.tensor([1.0, 2.0, 4.0]), "left": torch.ones(2), "shape": torch.ones(2, 3), "type": torch.ones(2)},
        frozen={"text": words("x")},
        optimizer={"group0": toc.OptimizerGroup(3, 0.5, 0.25, {}, {"eps": 1.0}), "early": toc.OptimizerGroup()},
        properties={"epoch": 1, "old": 5},
    )
    b = toc.CheckpointState(
        trainable={"w": torch.tensor([1.0, 2.5, 5.0]), "right": torch.ones(2), "shape": torch.ones(3, 2), "type": torch.ones(2).half()},
        frozen={"text": words("y")},
        optimizer={"group0": toc.OptimizerGroup(4, 0.75, None, {}, {"eps": 2.0})},
        properties={"epoch": 2, "new": "z"},
        partitions={"w": toc.PartitionInfo((3,), 0)},
    )
    return a, b


EXPECTED = {
    "trainable/left": "only in a",
    "trainable/right": "only in b",
    "trainable/shape": "shape (2, 3) / (3, 2)",
    "trainable/type": "float32 / float16",
    "trainable/w": "values",
    "frozen/text": "strings differ",
    "properties/epoch": "1 / 2",
    "properties/old": "only in a",
    "properties/new": "only in b",
    "partitions/w": "only in b",
    "optimizer/early.hyperparameters": "only in a",
    "optimizer/early.initial_lr": "only in a",
    "optimizer/early.lr": "only in a",
    "optimizer/early.step": "only in a",
    "optimizer/group0.hyperparameters": "{'eps': 1.0} / {'eps': 2.0}",
    "optimizer/group0.initial_lr": "0.5 / 0.75",
    "optimizer/group0.lr": "0.25 / None",
    "optimizer/group0.step": "3 / 4",
}
SWAPPED = {"only in a": "only in b", "only in b": "only in a"}


def test_every_difference_names_its_side() -> None:
    a, b = sides()
    assert {item.name: item.what for item in toc.diff(a, b)} == EXPECTED
    turned = {item.name: item.what for item in toc.diff(b, a)}
    assert turned == {
        name: SWAPPED.get(what) or (f"{' / '.join(reversed(what.split(' / ')))}" if " / " in what and "shape" not in what else what)
        for name, what in EXPECTED.items()
    } | {"trainable/shape": "shape (3, 2) / (2, 3)"}


def test_the_numbers_of_a_difference() -> None:
    a, b = sides()
    report = toc.diff(a, b)
    (found,) = (item for item in report if item.name == "trainable/w")
    assert dataclasses.asdict(found) == {
        "name": "trainable/w", "what": "values", "changed": 2, "total": 3, "max_abs": 1.0, "mean_abs": 0.5, "relative": 0.2,
    }  # fmt: skip
    assert str(found) == "trainable/w: 2 of 3 elements, max |a-b| 1, relative 0.2"
    assert report.compared == 6 + 1 + 3 + 1 + 8  # tensors, nominal, properties, partitions, numbers of groups
    assert str(report).splitlines()[0] == "19 compared, 18 differ"
    assert report.to_json() == {"equal": False, "compared": 19, "differences": [dataclasses.asdict(item) for item in report]}


def test_tolerances_are_relative_to_the_second_state() -> None:
    a, b = (toc.CheckpointState({"w": torch.tensor([value])}) for value in (8.0, 10.0))
    assert not toc.diff(a, b, rtol=0.19).equal
    assert toc.diff(a, b, rtol=0.2).equal
    assert not toc.diff(b, a, rtol=0.24).equal
    assert toc.diff(b, a, rtol=0.25).equal
    assert toc.diff(a, b, atol=2.0).equal
    assert not toc.diff(a, b, atol=1.9).equal
    assert toc.diff(a, b, atol=1.0, rtol=0.1).equal


@pytest.mark.parametrize(
    ("x", "y", "changed", "largest"),
    [
        ([0.0], [-0.0], 1, 0.0),
        ([float("nan"), 1.0], [float("nan"), 2.0], 1, 1.0),
        ([float("nan")], [1.0], 1, float("inf")),
        ([float("inf"), 0.0], [float("inf"), 3.0], 1, 3.0),
        ([float("inf")], [float("-inf")], 1, float("inf")),
    ],
)
def test_signs_and_what_is_no_number(x: list[float], y: list[float], changed: int, largest: float) -> None:
    (found,) = toc.diff(toc.CheckpointState({"w": torch.tensor(x)}), toc.CheckpointState({"w": torch.tensor(y)}))
    assert (found.changed, found.max_abs) == (changed, largest)


def test_negative_tolerances_are_refused() -> None:
    for name in ("atol", "rtol"):
        with pytest.raises(toc.CheckpointError, match=f"{name} must not be negative"):
            toc.diff(toc.CheckpointState(), toc.CheckpointState(), **{name: -1.0})
        assert toc.diff(toc.CheckpointState(), toc.CheckpointState(), **{name: 0.0}).equal


def test_progress_counts_the_bytes_of_both_sides(tmp_path: Path) -> None:
    a, b = sides()
    counted: list[int] = []
    toc.diff(a, b, progress=counted.append)
    sizes = dict.fromkeys(("frozen/text", "trainable/left", "trainable/right", "trainable/shape", "trainable/type", "trainable/w"), 0)
    for state in (a, b):
        for name, value in state.tensors():
            sizes[name] += value.nbytes if isinstance(value, torch.Tensor) else sum(len(text) for text in value.tolist())
    assert counted == list(sizes.values())


def test_a_nominal_state_differs_from_a_complete_one() -> None:
    complete = toc.CheckpointState({"w": torch.ones(2)})
    nominal = toc.CheckpointState({"w": torch.empty(0, device="meta")}, nominal=True)
    assert {item.name: item.what for item in toc.diff(complete, nominal)} == {"trainable/w": "one has no data", "nominal": "False / True"}
    assert toc.diff(nominal, nominal).equal
