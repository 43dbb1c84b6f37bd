"""`average` and inputs with NaN or infinite values: refused with file and tensor named, or left out and said so."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt.cli import main

FLOATS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.complex64,
]  # fmt: skip


def state(value: float, **more: Any) -> toc.CheckpointState:
    moments = {"w": {"momentum0": torch.full((3,), value), "momentum1": torch.full((3,), value)}}
    return toc.CheckpointState(
        trainable={"w": torch.full((3,), value)},
        frozen={"count": torch.tensor(7)},
        optimizer={"group0": toc.OptimizerGroup(4, states=moments)},
        **more,
    )


def spoiled(where: str, value: float = math.nan, at: float = 1.0) -> toc.CheckpointState:
    """A state in which one element of one tensor is not a number."""
    bad = state(at)
    tensors = dict(bad.tensors())
    tensors[where][1] = value
    return bad


@pytest.mark.parametrize("where", ["trainable/w", "optimizer/group0/w/momentum1"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_input_is_refused_by_file_and_tensor(where: str, value: float, tmp_path: Path) -> None:
    toc.save(state(1.0), tmp_path / "good")
    toc.save(spoiled(where, value), tmp_path / "bad")
    with pytest.raises(toc.CheckpointError, match="NaN or infinite") as caught:
        toc.average([tmp_path / "good", tmp_path / "bad", tmp_path / "good"])
    assert caught.value.path == str(tmp_path / "bad")
    assert caught.value.field == where
    assert "skip_bad" in str(caught.value)


@pytest.mark.parametrize("weights", [None, [1.0, 0.0]])
def test_neither_equal_inputs_nor_a_weight_of_zero_hide_it(weights: list[float] | None) -> None:
    with pytest.raises(toc.CheckpointError, match=r"state 1.*NaN or infinite") as caught:
        toc.average([state(1.0), spoiled("trainable/w")], weights)
    assert caught.value.path == "state 1"
    with pytest.raises(toc.CheckpointError, match="NaN or infinite"):
        toc.average([spoiled("trainable/w"), spoiled("trainable/w")], weights)
    with pytest.raises(toc.CheckpointError, match="NaN or infinite"):
        toc.average([spoiled("trainable/w")])


def test_opposite_infinities_are_both_seen() -> None:
    with pytest.raises(toc.CheckpointError, match="NaN or infinite") as caught:
        toc.average([spoiled("trainable/w", math.inf), spoiled("trainable/w", -math.inf)])
    assert caught.value.path == "state 0"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_floating_point_type_is_looked_at(dtype: torch.dtype) -> None:
    good = toc.CheckpointState({"w": torch.tensor([1.0, 2.0]).to(dtype)})
    bad = toc.CheckpointState({"w": torch.tensor([1.0, math.nan]).to(dtype)})
    with pytest.raises(toc.CheckpointError, match="NaN or infinite"):
        toc.average([good, bad])
    assert torch.equal(toc.average([good, good.clone()]).trainable["w"].to(torch.complex64), good.trainable["w"].to(torch.complex64))


def test_the_last_of_many_pieces_is_looked_at() -> None:
    good, bad = torch.ones(5 << 20), torch.full((5 << 20,), 2.0)
    bad[-1] = math.inf
    with pytest.raises(toc.CheckpointError, match="NaN or infinite"):
        toc.average([toc.CheckpointState({"w": good}), toc.CheckpointState({"w": bad})])


def test_large_finite_values_are_no_fault() -> None:
    large = torch.full((4,), torch.finfo(torch.float64).max, dtype=torch.float64)
    result = toc.average([toc.CheckpointState({"w": large}), toc.CheckpointState({"w": large / 2})])
    assert torch.allclose(result.trainable["w"], large * 0.75)


def test_complex_numbers_keep_their_imaginary_part() -> None:
    a, b = (toc.CheckpointState({"w": torch.tensor([z])}) for z in (1 + 2j, 3 + 6j))
    assert toc.average([a, b]).trainable["w"].tolist() == [2 + 4j]


def test_bad_inputs_can_be_left_out(tmp_path: Path) -> None:
    for name, each in (("a", state(1.0)), ("b", spoiled("trainable/w")), ("c", spoiled("optimizer/group0/w/momentum0")), ("d", state(4.0))):
        toc.save(each, tmp_path / name)
    with pytest.warns(toc.CheckpointWarning) as caught:
        result = toc.average([tmp_path / name for name in "abcd"], [1, 100, 100, 2], skip_bad=True)
    assert result == state(3.0)  # weights 1 and 2 of what is left
    said = [str(warning.message) for warning in caught]
    assert len(said) == 1
    assert all(part in said[0] for part in ("2 of 4", str(tmp_path / "b"), str(tmp_path / "c"), "trainable/w", "group0/w/momentum0"))


def test_leaving_out_gives_what_the_others_alone_give() -> None:
    torch.manual_seed(0)
    good = [toc.CheckpointState({"v": torch.randn(1000), "w": torch.randn(5)}) for _ in range(4)]
    bad = toc.CheckpointState({"v": torch.randn(1000), "w": torch.full((5,), math.nan)})
    expected = toc.average(good, [1, 2, 3, 4])
    for place in range(5):
        weights = [1.0, 2, 3, 4]
        weights.insert(place, 7)
        with pytest.warns(toc.CheckpointWarning, match="left out"):
            assert toc.average([*good[:place], bad, *good[place:]], weights, skip_bad=True) == expected


def test_without_bad_inputs_nothing_is_said() -> None:
    assert toc.average([state(1.0), state(3.0)], skip_bad=True) == state(2.0)


def test_what_only_a_bad_input_disagrees_in_does_not_matter() -> None:
    good, bad = state(1.0), spoiled("optimizer/group0/w/momentum1")
    good.frozen["flag"], bad.frozen["flag"] = torch.tensor(True), torch.tensor(False)
    bad.properties["epoch"] = 3
    with pytest.warns(toc.CheckpointWarning) as caught:
        assert toc.average([bad, good, good], skip_bad=True) == good
    assert len(caught) == 1
    other = state(2.0)
    other.frozen["flag"] = torch.tensor(False)
    with pytest.raises(toc.CheckpointError, match="can't be averaged"):
        toc.average([good, other], skip_bad=True)


def test_a_single_state_is_not_a_list_of_them() -> None:
    with pytest.raises(toc.CheckpointError, match="expected a list of checkpoints"):
        toc.average(state(1.0))  # type: ignore[arg-type]


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(toc.CheckpointError, match="all 2 checkpoints have NaN or infinite values"):
        toc.average([spoiled("trainable/w"), spoiled("trainable/w", math.inf)], skip_bad=True)
    with pytest.warns(toc.CheckpointWarning, match="left out"), pytest.raises(toc.CheckpointError, match="not all zero"):
        toc.average([state(1.0), spoiled("trainable/w")], [0.0, 1.0], skip_bad=True)


def test_each_weights_own_step_and_rates_are_not_lost_in_silence() -> None:
    a, b = state(1.0), state(1.0)
    a.optimizer["group0"].states["w"]["step"] = torch.tensor(2)
    b.optimizer["group0"].states["w"]["step"] = torch.tensor(3)
    assert int(toc.average([a, b]).optimizer["group0"].states["w"]["step"]) == 3
    b = state(1.0)  # 4, the group's
    assert "step" not in toc.average([a, b]).optimizer["group0"].states["w"]
    a, b = state(1.0), state(1.0)
    a.optimizer["group0"].lr, b.optimizer["group0"].lr = 0.1, 0.2
    b.optimizer["group0"].hyperparameters["eps"] = 1e-6
    with pytest.warns(toc.CheckpointWarning, match="lr, eps differ"):
        result = toc.average([a, b])
    assert result.optimizer["group0"].lr is None
    assert result.optimizer["group0"].hyperparameters == {}


@pytest.mark.parametrize("change", [lambda group: group.states.pop("v"), lambda group: group.states.update(x={})])
def test_other_members_are_refused(change: Any) -> None:
    a, b = state(1.0), state(1.0)
    a.optimizer["group0"].states["v"], b.optimizer["group0"].states["v"] = {}, {}
    change(b.optimizer["group0"])
    with pytest.raises(toc.CheckpointError, match="optimizer/group0"):
        toc.average([a, b])
    b.optimizer = {"other": toc.OptimizerGroup()}
    a.optimizer = {"group0": toc.OptimizerGroup()}
    with pytest.raises(toc.CheckpointError, match="optimizer/"):
        toc.average([a, b])


def test_an_alias_without_its_master_is_averaged_itself() -> None:
    ranks = [toc.CheckpointState(mixed_precision={"w": torch.full((2,), x, dtype=torch.float16)}) for x in (1.0, 2.0)]
    assert toc.average(ranks).mixed_precision["w"].tolist() == [1.5, 1.5]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toc.save(state(1.0), tmp_path / "good")
    toc.save(spoiled("trainable/w"), tmp_path / "bad")
    arguments = ["average", str(tmp_path / "good"), str(tmp_path / "bad"), "-o", str(tmp_path / "mean")]
    assert main(arguments) == 2
    assert "--skip-bad" in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()
    assert main([*arguments, "--skip-bad"]) == 0
    out = capsys.readouterr()
    assert "left out" in out.err
    assert str(tmp_path / "bad") in out.err
    assert toc.load(tmp_path / "mean") == state(1.0)


def numbered(step: int, value: float = 1.0, initial_lr: float = 0.5, **properties: Any) -> toc.CheckpointState:
    result = state(value, properties=properties)
    result.optimizer["group0"].step, result.optimizer["group0"].initial_lr = step, initial_lr
    return result


def test_inputs_at_different_steps_are_told() -> None:
    with pytest.warns(toc.CheckpointWarning) as caught:
        result = toc.average([numbered(5), numbered(9), numbered(7)])
    assert [str(warning.message) for warning in caught] == ["group0: the inputs are at different steps (5 to 9); the result takes 9"]
    assert result.optimizer["group0"].step == 9


def test_different_initial_rates_are_told() -> None:
    with pytest.warns(toc.CheckpointWarning) as caught:
        result = toc.average([numbered(4), numbered(4, initial_lr=0.25)])
    assert [str(warning.message) for warning in caught] == [
        "group0: the inputs have different initial rates; the result takes the first one's, 0.5"
    ]
    assert result.optimizer["group0"].initial_lr == 0.5


def test_properties_that_one_lacks_or_has_otherwise_are_told() -> None:
    with pytest.warns(toc.CheckpointWarning) as caught:
        result = toc.average([numbered(4, a=1, b=2, d=4), numbered(4, a=1, b=3, c=5)])
    assert [str(warning.message) for warning in caught] == ["properties that differ between the inputs are left out: b, c, d"]
    assert result.properties == {"a": 1}
    with pytest.warns(toc.CheckpointWarning, match=r"left out: p0, p1, p2, p3, p4 \.\.\.$"):
        toc.average([numbered(4, **{f"p{n}": n for n in range(6)}), numbered(4)])


def test_what_all_inputs_have_is_kept() -> None:
    one = numbered(4, epoch=3)
    one.optimizer["group0"].lr, one.optimizer["group0"].hyperparameters = 0.25, {"eps": 1e-6}
    one.partitions = {"w": toc.PartitionInfo((3,), -1)}
    one.mixed_precision = {"w": torch.ones(3).half()}
    assert toc.average([one, one.clone()]) == one


@pytest.mark.parametrize(
    ("other", "message", "field"),
    [
        ({"w": torch.ones(3)}, r"lacks this", "trainable/v"),
        ({"w": torch.ones(3), "v": torch.ones(1), "u": torch.ones(1)}, "has this", "trainable/u"),
        ({"w": torch.ones(3), "v": torch.ones(2)}, r"\(2,\) torch.float32, the first input has \(1,\) torch.float32", "trainable/v"),
        ({"w": torch.ones(3), "v": torch.ones(1).half()}, r"\(1,\) torch.float16, the first", "trainable/v"),
    ],
)
def test_other_tensors_are_refused(other: dict[str, torch.Tensor], message: str, field: str) -> None:
    first = toc.CheckpointState({"w": torch.ones(3), "v": torch.ones(1)})
    with pytest.raises(toc.CheckpointError, match=message) as caught:
        toc.average([first, first, toc.CheckpointState(other)])
    assert (caught.value.path, caught.value.field) == ("state 2", field)


def test_progress_counts_the_bytes_of_all_inputs() -> None:
    counted: list[int] = []
    toc.average([state(1.0), state(2.0)], progress=counted.append)
    assert sum(counted) == 2 * (3 * 12 + 8)  # w and two moments of it, and the count


def test_fifty_bad_inputs_are_listed_at_most() -> None:
    for count, more in ((50, False), (51, True)):
        with pytest.warns(toc.CheckpointWarning) as caught:
            toc.average([state(1.0), *[spoiled("trainable/w")] * count], skip_bad=True)
        said = str(caught[0].message)
        assert said.startswith(f"{count} of {count + 1} checkpoints")
        assert said.endswith("state 50 (trainable/w) ..." if more else "state 50 (trainable/w)")
