"""`CheckpointState`: plain data, compared by bits, never copied behind the caller's back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from torch_ort_ckpt import CheckpointError, CheckpointState, OptimizerGroup
from torch_ort_ckpt.checkpoint.names import check_aliases, split_aliases


def sample() -> CheckpointState:
    weight = torch.arange(6.0).reshape(2, 3)
    group = OptimizerGroup(step=5, lr=0.5, states={"w": {"momentum0": torch.zeros(2, 3)}})
    return CheckpointState({"w": weight}, {"b": torch.tensor([True])}, {"group0": group}, {"epoch": 3})


def test_repr_says_counts_sizes_and_step() -> None:
    state = sample()
    state.mixed_precision["w"] = state.trainable["w"].half()
    text = repr(state)
    for part in ("1 trainable (24 B)", "1 frozen (1 B)", "1 half-precision aliases", "group0: step 5, 1 states (24 B)", "1 properties"):
        assert part in text
    assert "lr=0.5" in repr(state.optimizer["group0"])


def test_equality_compares_bits() -> None:
    a, b = sample(), sample()
    assert a == b
    a.trainable["w"][0, 0] = b.trainable["w"][0, 0] = math.nan
    assert a == b
    b.trainable["w"][0, 0] = -math.nan  # another NaN
    assert a != b
    zero, minus = sample(), sample()
    minus.trainable["w"][0, 0] = -0.0
    assert zero != minus


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.properties.update(epoch=4),
        lambda s: s.properties.update(epoch=3.0),
        lambda s: s.frozen.update(x=torch.zeros(1)),
        lambda s: setattr(s.optimizer["group0"], "step", 6),
        lambda s: setattr(s.optimizer["group0"], "lr", None),
        lambda s: s.optimizer["group0"].states["w"].update(momentum1=torch.zeros(1)),
        lambda s: setattr(s, "nominal", True),
        lambda s: s.mixed_precision.update(w=s.trainable["w"].half()),
        lambda s: s.trainable.update(w=s.trainable["w"].double()),
        lambda s: s.trainable.update(w=s.trainable["w"].reshape(3, 2)),
        lambda s: s.frozen.update(b=np.array(["x"], dtype=object)),
    ],
)
def test_every_part_counts_for_equality(change: object) -> None:
    state = sample()
    change(state)  # type: ignore[operator]
    assert state != sample()


def test_parameters_is_a_read_only_view_of_both() -> None:
    state = sample()
    assert set(state.parameters) == {"w", "b"}
    assert state.parameters["w"] is state.trainable["w"]
    with pytest.raises(TypeError):
        state.parameters["w"] = torch.zeros(1)  # type: ignore[index]


def test_clone_shares_nothing_and_keeps_ties() -> None:
    state = sample()
    state.trainable["tied"] = state.trainable["w"]
    copy = state.clone()
    assert copy == state
    assert copy.trainable["tied"] is copy.trainable["w"]
    copy.trainable["w"].zero_()
    copy.optimizer["group0"].states["w"]["momentum0"].fill_(1)
    assert state.trainable["w"].sum() == 15
    assert state.optimizer["group0"].states["w"]["momentum0"].sum() == 0


class TestMixedPrecision:
    def with_alias(self, dtype: torch.dtype = torch.float16) -> CheckpointState:
        suffix = "_fp16" if dtype == torch.float16 else "_bf16"
        weight = torch.tensor([1.0, 1.0 / 3])
        return split_aliases(CheckpointState({"w": weight, f"w{suffix}": weight.to(dtype)}))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_an_entry_beside_its_master_is_an_alias(self, dtype: torch.dtype) -> None:
        state = self.with_alias(dtype)
        assert list(state.trainable) == ["w"]
        assert state.mixed_precision["w"].dtype == dtype

    @pytest.mark.parametrize(
        "entry",
        [
            {"w_fp16": torch.zeros(2).half()},  # no master
            {"w": torch.zeros(2), "w_fp16": torch.zeros(2)},  # not half
            {"w": torch.zeros(2), "w_fp16": torch.zeros(2).bfloat16()},  # the other half
            {"w": torch.zeros(2), "w_fp16": torch.zeros(3).half()},  # another shape
            {"w": torch.zeros(2).half(), "w_fp16": torch.zeros(2).half()},  # the master is half itself
            {"w": torch.zeros(2, dtype=torch.int32), "w_fp16": torch.zeros(2).half()},
        ],
    )
    def test_what_only_looks_like_an_alias_stays_a_weight(self, entry: dict[str, torch.Tensor]) -> None:
        state = split_aliases(CheckpointState(dict(entry)))
        assert not state.mixed_precision
        assert state.trainable.keys() == entry.keys()

    def test_setting_a_master_refreshes_its_alias(self) -> None:
        state = self.with_alias()
        state.set_parameter("w", torch.tensor([2.0, 4.0]))
        assert state.mixed_precision["w"].tolist() == [2.0, 4.0]
        with pytest.raises(CheckpointError, match="no parameter named 'v'"):
            state.set_parameter("v", torch.zeros(1))

    def test_a_master_changed_in_place_is_noticed_and_refreshed(self) -> None:
        state = self.with_alias()
        assert state.stale_aliases() == []
        state.trainable["w"].add_(1)
        assert state.stale_aliases() == ["w"]
        with pytest.raises(CheckpointError, match="differ from their rounded masters"):
            check_aliases(state)
        assert state.refresh_mixed_precision() == ["w"]
        check_aliases(state)

    def test_nan_agrees_with_nan(self) -> None:
        state = CheckpointState({"w": torch.tensor([math.nan])}, mixed_precision={"w": torch.tensor([-math.nan]).half()})
        assert state.stale_aliases() == []

    def test_a_weight_that_is_only_half_is_promoted_on_request(self) -> None:
        state = CheckpointState({"w_fp16": torch.tensor([1.5]).half()})
        assert state.promote_half() == ["w"]
        assert state.trainable["w"].dtype == torch.float32
        assert state.trainable["w"].item() == 1.5
        assert state.mixed_precision["w"].dtype == torch.float16


def test_a_state_reads_like_a_mapping_of_its_parameters() -> None:
    state = sample()
    assert state["w"] is state.trainable["w"]
    assert state["b"] is state.frozen["b"]
    assert "w" in state
    assert "b" in state
    assert "momentum0" not in state
    assert len(state) == 2
    assert list(state) == list(state.keys()) == ["w", "b"]
    assert [(name, id(value)) for name, value in state.items()] == [("w", id(state["w"])), ("b", id(state["b"]))]
    assert dict(state).keys() == {"w", "b"}


def test_a_name_in_both_homes_is_the_one_of_parameters() -> None:
    state = CheckpointState({"w": torch.zeros(1)}, {"w": torch.ones(1)})
    assert state["w"] is state.parameters["w"]
    assert len(state) == 1


def test_an_unknown_name_is_a_key_error_that_names_near_ones() -> None:
    state = CheckpointState({"fc.weight": torch.zeros(1), "conv.bias": torch.zeros(1)})
    with pytest.raises(KeyError, match=r"no parameter named 'fc.weigth' \(did you mean 'fc.weight'\?\)"):
        state["fc.weigth"]
    with pytest.raises(KeyError) as caught:
        state["zzz"]
    assert caught.value.args == ("no parameter named 'zzz'",)
    with pytest.raises(KeyError, match="no parameter named 0"):
        state[0]  # type: ignore[index]


def test_a_state_is_true_even_without_parameters() -> None:
    assert CheckpointState()
    assert len(CheckpointState()) == 0
