"""Moments belong to one optimizer: starting from zero gives a warning, and nothing that is loaded is ignored."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from tests.models import batch, exported
from tests.official import Official, batches
from tests.runtime.test_optimizer import ADAMW, SGD, train, with_optimizer
from tests.truth import DATA

pytestmark = pytest.mark.ort_any


def moments(optimizer: toc.OrtOptimizer) -> float:
    return sum(float(state["exp_avg"].abs().sum()) for state in optimizer.state.values())


class TestASecondOptimizer:
    def test_says_that_it_starts_from_zero(self) -> None:
        model = toc.OrtModule(ADAMW, threads=1)
        first = toc.OrtOptimizer(model)  # takes the checkpoint's moments
        data = batches(model.artifacts, 2)
        second = toc.OrtOptimizer(model)
        with pytest.warns(toc.CheckpointWarning, match=r"moments of 5 parameters.*from zero.*load_state_dict"):
            train(model, second, data[:1])
        train(model, second, data[1:])  # the warning is given once
        assert first.checkpoint_step == 5

    def test_says_so_where_the_first_one_has_trained(self) -> None:
        model = toc.OrtModule(exported("mlp"), threads=1)
        train(model, toc.OrtOptimizer(model), [list(batch("mlp"))])
        with pytest.warns(toc.CheckpointWarning, match="from zero"):
            train(model, toc.OrtOptimizer(model), [list(batch("mlp"))])

    def test_says_so_on_a_copy_of_the_model(self) -> None:
        model = toc.OrtModule(ADAMW, threads=1)
        toc.OrtOptimizer(model)
        twin = copy.deepcopy(model)
        with pytest.warns(toc.CheckpointWarning, match="from zero"):
            train(twin, toc.OrtOptimizer(twin), batches(model.artifacts, 1))

    def test_goes_on_silently_with_the_state_of_the_first(self) -> None:
        model = toc.OrtModule(ADAMW, threads=1)
        first, second = toc.OrtOptimizer(model), toc.OrtOptimizer(model)
        second.load_state_dict(first.state_dict())
        train(model, second, batches(model.artifacts, 1))
        assert second.checkpoint_step == 6
        third = toc.OrtOptimizer(model)
        model.load_checkpoint(model.checkpoint(second).clone(), third)
        train(model, third, batches(model.artifacts, 1))
        assert third.checkpoint_step == 7

    def test_two_with_parameters_of_their_own_share_the_checkpoint(self) -> None:
        model = toc.OrtModule(ADAMW, threads=1)
        reference = toc.OrtModule(ADAMW, threads=1)
        parameters = list(model.named_trainable().values())
        both = [toc.OrtOptimizer(model, params=parameters[:2]), toc.OrtOptimizer(model, params=parameters[2:])]
        whole = toc.OrtOptimizer(reference)
        for inputs in batches(model.artifacts, 3):
            model(*inputs).backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        train(reference, whole, batches(model.artifacts, 3))
        assert [optimizer.checkpoint_step for optimizer in both] == [8, 8]
        for name, value in reference.named_tensors().items():
            assert torch.equal(value, model.named_tensors()[name])

    def test_one_that_could_not_be_made_takes_nothing(self) -> None:
        model = toc.OrtModule(ADAMW, threads=1)
        with pytest.raises(toc.CheckpointError):
            toc.OrtOptimizer(model, params=[torch.nn.Parameter(torch.zeros(2))])
        assert toc.OrtOptimizer(model).checkpoint_step == 5


class TestLoading:
    def test_a_checkpoint_without_moments_says_that_the_optimizer_stays(self) -> None:
        model = toc.OrtModule(ADAMW, threads=1)
        optimizer = toc.OrtOptimizer(model)
        with pytest.warns(toc.CheckpointWarning, match="no optimizer state"):
            model.load_checkpoint(DATA / "fbv2_ort1_19_2_adamw_noopt" / "checkpoint", optimizer)
        fresh = toc.OrtModule(exported("mlp"), threads=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fresh.load_checkpoint(exported("mlp").checkpoint_path, toc.OrtOptimizer(fresh))

    def test_parameters_that_the_checkpoint_has_no_moments_for_start_afresh(self) -> None:
        artifacts = toc.Artifacts.load(ADAMW)
        model = toc.OrtModule(artifacts, threads=1)
        optimizer = toc.OrtOptimizer(model)
        state = model.checkpoint(optimizer).clone()
        state.optimizer["group0"].states["fc1.bias"] = {}
        del state.optimizer["group0"].states["fc2.bias"]
        train(model, optimizer, batches(artifacts, 2))
        model.load_checkpoint(state, optimizer)
        train(model, optimizer, batches(artifacts, 1))
        counts = {name: int(optimizer.state[value]["step"]) for name, value in model.named_trainable().items()}
        assert counts == {"fc1.weight": 6, "fc1.bias": 1, "fc2.weight": 6, "fc2.bias": 1, "norm.gain": 6}

    @pytest.mark.ort
    def test_a_count_without_moments_goes_on_as_in_ort(self, tmp_path: Path) -> None:
        artifacts = toc.Artifacts.load(ADAMW)
        state = artifacts.state.clone()
        state.optimizer["group0"].states.clear()
        official = Official(artifacts, tmp_path, state=state)
        toc.save(state, tmp_path / "c")
        model = toc.OrtModule(toc.Artifacts.load(ADAMW, checkpoint=tmp_path / "c"), threads=1)
        optimizer = toc.OrtOptimizer(model, lr=0.001)
        data = batches(artifacts, 3)
        expected = [float(official.step(*inputs)) for inputs in data]
        assert train(model, optimizer, data) == expected
        assert optimizer.checkpoint_step == 8

    def test_groups_with_other_rates_are_not_folded_into_one(self) -> None:
        model = toc.OrtModule(ADAMW, threads=1)
        parameters = list(model.named_trainable().values())
        two = toc.OrtOptimizer(model, params=[{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "lr": 0.2}])
        state = model.checkpoint(two).clone()
        other = toc.OrtModule(ADAMW, threads=1)
        one = toc.OrtOptimizer(other)
        with pytest.raises(toc.CheckpointError, match="group0, group1"):
            other.load_checkpoint(state, one)
        for group in state.optimizer.values():
            group.lr = 0.3
        other.load_checkpoint(state, one)
        assert one.param_groups[0]["lr"] == 0.3

    def test_nothing_changes_when_a_moment_does_not_fit(self) -> None:
        model = toc.OrtModule(ADAMW, threads=1)
        optimizer = toc.OrtOptimizer(model, lr=0.5)
        before = moments(optimizer)
        state = model.checkpoint(optimizer).clone()
        state.optimizer["group0"].lr = 0.25
        state.optimizer["group0"].states["norm.gain"]["momentum1"] = torch.zeros(7)
        for states in state.optimizer["group0"].states.values():
            states["momentum0"].add_(1)
        with pytest.raises(toc.CheckpointError, match=r"norm\.gain/momentum1"):
            model.load_checkpoint(state, optimizer)
        assert moments(optimizer) == before
        assert optimizer.param_groups[0]["lr"] == 0.5


class TestWhatTheGraphHasNot:
    """Options of `torch.optim` that the graph does not have are refused, as they would be ignored."""

    @pytest.mark.parametrize(
        ("source", "option"),
        [
            (ADAMW, {"amsgrad": True}),
            (ADAMW, {"maximize": True}),
            (SGD, {"momentum": 0.9}),
            (SGD, {"weight_decay": 0.1}),
            (SGD, {"maximize": True}),
        ],
    )
    def test_is_refused(self, source: Path, option: dict[str, float]) -> None:
        (name,) = option
        model, twin = toc.OrtModule(source, threads=1), toc.OrtModule(source, threads=1)
        kind = torch.optim.AdamW if source == ADAMW else torch.optim.SGD
        plain = kind(twin.named_trainable().values(), lr=0.01, **option)
        (inputs,) = batches(model.artifacts, 1)
        train(twin, plain, [inputs])
        optimizer = toc.OrtOptimizer(model)
        with pytest.raises(toc.CheckpointError, match=name):
            optimizer.load_state_dict(plain.state_dict())
        with pytest.raises(toc.CheckpointError, match=name):
            model.load_checkpoint(toc.from_torch(twin, plain, like=model.artifacts.state), optimizer)
        with pytest.raises(toc.CheckpointError, match=name):
            toc.OrtOptimizer(model, params=[{"params": list(model.named_trainable().values()), **option}])
        model(*inputs).backward()
        optimizer.param_groups[0].update(option)
        with pytest.raises(toc.CheckpointError, match=name):
            optimizer.step()

    def test_decay_that_is_not_decoupled_is_refused(self, tmp_path: Path) -> None:
        model = toc.OrtModule(with_optimizer(tmp_path, adam_mode=0), threads=1)
        adam = torch.optim.Adam(model.named_trainable().values(), weight_decay=0.1)
        train(model, adam, batches(model.artifacts, 1))
        with pytest.raises(toc.CheckpointError, match="decoupled"):
            toc.OrtOptimizer(model).load_state_dict(adam.state_dict())

    def test_a_state_of_another_kind_is_refused(self) -> None:
        model = toc.OrtModule(ADAMW, threads=1)
        sgd = torch.optim.SGD(model.named_trainable().values(), momentum=0.9)
        train(model, sgd, batches(model.artifacts, 1))
        with pytest.raises(toc.CheckpointError, match="exp_avg"):
            toc.OrtOptimizer(model).load_state_dict(sgd.state_dict())
