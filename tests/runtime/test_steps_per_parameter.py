"""A parameter that had no gradient has not been stepped: counts are kept per parameter, as `torch.optim` does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.official import Official, assert_same, batches
from tests.runtime.test_optimizer import SGD, with_optimizer

pytestmark = pytest.mark.ort_any

LATE, FROZEN = "fc2.bias", "fc1.weight"


def run(model: toc.OrtModule, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    """`FROZEN` is frozen from step 5 to 10, `LATE` until step 3."""
    parameters = model.named_trainable()
    for number, batch in enumerate(batches(model.artifacts, stop)):
        if number < start:
            continue
        parameters[FROZEN].requires_grad_(not 5 <= number < 10)
        parameters[LATE].requires_grad_(number >= 3)
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(left: toc.OrtModule, right: toc.OrtModule) -> None:
    for name, value in left.named_trainable().items():
        torch.testing.assert_close(value, right.named_trainable()[name], rtol=2e-5, atol=2e-6)


def steps(optimizer: torch.optim.Optimizer, model: toc.OrtModule) -> dict[str, int]:
    return {name: int(optimizer.state[value]["step"]) for name, value in model.named_trainable().items()}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> toc.Artifacts:
    return with_optimizer(tmp_path_factory.mktemp("steps"), adam_mode=0, weight_decay=0.1)


@pytest.mark.parametrize("fused", [False, True])
class TestFollowsAdamW:
    def pair(self, artifacts: toc.Artifacts, fused: bool) -> tuple[toc.OrtModule, toc.OrtOptimizer, toc.OrtModule, torch.optim.AdamW]:
        model, twin = toc.OrtModule(artifacts, threads=1), toc.OrtModule(artifacts, threads=1)
        plain = torch.optim.AdamW(twin.named_trainable().values(), lr=0.02, eps=1e-6, weight_decay=0.1)
        return model, toc.OrtOptimizer(model, lr=0.02, fused=fused), twin, plain

    def test_a_parameter_frozen_and_thawed(self, artifacts: toc.Artifacts, fused: bool) -> None:
        model, optimizer, twin, plain = self.pair(artifacts, fused)
        run(model, optimizer, 0, 20)
        run(twin, plain, 0, 20)
        assert steps(optimizer, model) == steps(plain, twin)
        assert {steps(optimizer, model)[name] for name in (FROZEN, LATE, "fc1.bias")} == {15, 17, 20}
        compare(model, twin)

    @pytest.mark.parametrize("stop", [4, 8, 13])
    @pytest.mark.parametrize("format", ["ort", "safetensors", "torch"])
    def test_a_checkpoint_in_between_changes_nothing(
        self, artifacts: toc.Artifacts, fused: bool, stop: int, format: str, tmp_path: Path
    ) -> None:
        model, optimizer, twin, plain = self.pair(artifacts, fused)
        run(model, optimizer, 0, stop)
        toc.save(model.checkpoint(optimizer), tmp_path / "c", format=format)
        state = toc.load(tmp_path / "c")
        group = state.optimizer["group0"]
        assert group.step == stop
        assert {int(own.get("step", stop)) for own in group.states.values()} == set(steps(optimizer, model).values())
        resumed = toc.OrtModule(toc.Artifacts.load(artifacts.folder, checkpoint=state), threads=1)
        resumed_optimizer = toc.OrtOptimizer(resumed, fused=fused)
        run(resumed, resumed_optimizer, stop, 16)
        run(twin, plain, 0, 16)
        compare(resumed, twin)
        loaded = toc.OrtModule(artifacts, threads=1)
        loaded_optimizer = toc.OrtOptimizer(loaded, fused=fused)
        run(loaded, loaded_optimizer, 0, 2)
        loaded.load_checkpoint(tmp_path / "c", loaded_optimizer)
        run(loaded, loaded_optimizer, stop, 16)
        compare(loaded, twin)

    def test_state_dicts_move_both_ways(self, artifacts: toc.Artifacts, fused: bool) -> None:
        model, optimizer, twin, plain = self.pair(artifacts, fused)
        run(model, optimizer, 0, 8)
        run(twin, plain, 0, 8)
        third, fourth = toc.OrtModule(artifacts, threads=1), toc.OrtModule(artifacts, threads=1)
        third.load_state_dict(twin.state_dict())
        fourth.load_state_dict(model.state_dict())
        from_torch = toc.OrtOptimizer(third, fused=fused)
        from_torch.load_state_dict(copy.deepcopy(plain.state_dict()))
        to_torch = torch.optim.AdamW(fourth.named_trainable().values())
        to_torch.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each, own in ((model, optimizer), (third, from_torch), (fourth, to_torch)):
            run(each, own, 8, 16)
        compare(model, third)
        compare(model, fourth)
        state = toc.from_torch(twin, plain)
        assert {int(own.get("step", 8)) for own in state.optimizer["group0"].states.values()} == {5, 8}

    def test_counts_come_together_and_part_any_number_of_times(self, artifacts: toc.Artifacts, fused: bool) -> None:
        model, optimizer, twin, plain = self.pair(artifacts, fused)
        generator = torch.Generator().manual_seed(3)
        pattern = torch.rand(25, 5, generator=generator) < 0.6
        for each, own in ((model, optimizer), (twin, plain)):
            for batch, live in zip(batches(artifacts, 25), pattern.tolist(), strict=True):
                each(*batch).backward()
                for parameter, alive in zip(each.named_trainable().values(), live, strict=True):
                    if not alive:
                        parameter.grad = None
                own.step()
                own.zero_grad()
        assert steps(optimizer, model) == steps(plain, twin)
        compare(model, twin)


def test_state_tensors_set_the_count_of_one_weight(artifacts: toc.Artifacts) -> None:
    session = toc.TrainingSession(artifacts, threads=1)
    batch, *_ = batches(artifacts, 1)
    for _ in range(3):
        session.train_step(*batch)
        session.optimizer_step()
        session.lazy_reset_grad()
    session.set_state_tensors({f"Update_Count_{FROZEN}": torch.tensor([2])})
    counts = {name: int(entry["Update_Count"]) for name, entry in session.get_optimizer_state().items()}
    assert counts.pop(FROZEN) == 2
    assert set(counts.values()) == {4}
    session.train_step(*batch)
    session.optimizer_step()
    counts = {name: int(entry["Update_Count"]) for name, entry in session.get_optimizer_state().items()}
    assert counts.pop(FROZEN) == 3
    assert set(counts.values()) == {5}


class TestClipping:
    """The graph clips all gradients together, so it can't run once for each step count."""

    @pytest.mark.ort
    def test_the_graph_refuses_before_it_changes_anything(self, tmp_path: Path) -> None:
        model = toc.OrtModule(with_optimizer(tmp_path, adam_mode=0, clip=0.05), threads=1)
        optimizer = toc.OrtOptimizer(model, lr=0.02)
        run(model, optimizer, 5, 7)  # FROZEN is frozen: still one count for all others
        before = {name: value.detach().clone() for name, value in model.named_trainable().items()}
        with pytest.raises(toc.CheckpointError, match=r"different steps.*fused=True"):
            run(model, optimizer, 10, 11)
        assert all(torch.equal(value, before[name]) for name, value in model.named_trainable().items())
        assert optimizer.checkpoint_step == 2
        content = copy.deepcopy(optimizer.state_dict())
        content["state"][0]["step"] = torch.tensor(1.0)
        with pytest.raises(toc.CheckpointError, match="different steps"):
            toc.OrtOptimizer(model).load_state_dict(content)

    def test_fused_clips_all_together_and_follows_pytorch(self, tmp_path: Path) -> None:
        artifacts = with_optimizer(tmp_path, adam_mode=0, clip=0.05)
        model, twin = toc.OrtModule(artifacts, threads=1), toc.OrtModule(artifacts, threads=1)
        optimizer = toc.OrtOptimizer(model, lr=0.02, fused=True)
        plain = torch.optim.AdamW(twin.named_trainable().values(), lr=0.02, eps=1e-6, weight_decay=0.0)
        plain.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05) and None)
        run(model, optimizer, 0, 16)
        run(twin, plain, 0, 16)
        assert steps(optimizer, model) == steps(plain, twin)
        compare(model, twin)


def test_sgd_counts_the_steps_of_the_group_as_ort_does() -> None:
    model = toc.OrtModule(SGD, threads=1)
    optimizer = toc.OrtOptimizer(model, lr=0.02)
    before = optimizer.checkpoint_step
    run(model, optimizer, 0, 12)
    assert optimizer.checkpoint_step == before + 12
    assert not any("step" in own for own in optimizer.groups()["group0"].states.values())


@pytest.mark.ort
def test_ort_reads_a_file_with_counts_of_its_weights(artifacts: toc.Artifacts, tmp_path: Path) -> None:
    model = toc.OrtModule(artifacts, threads=1)
    optimizer = toc.OrtOptimizer(model, lr=0.02)
    run(model, optimizer, 0, 8)
    state = model.checkpoint(optimizer)
    official = Official(artifacts, tmp_path, state=state)
    (batch,) = batches(artifacts, 1)
    official.step(*batch)
    official.save(tmp_path / "after")
    after: Any = toc.load(tmp_path / "after").optimizer["group0"]
    assert after.step == 9
    assert not any("step" in own for own in after.states.values())  # ORT has one count for all


def test_a_frozen_parameter_keeps_still_after_lazy_reset(artifacts: toc.Artifacts) -> None:
    session = toc.TrainingSession(artifacts, threads=1)
    batch, *_ = batches(artifacts, 1)
    session.train_step(*batch)
    session.optimizer_step()
    session.lazy_reset_grad()
    weight = session.model.named_trainable()[FROZEN]
    weight.requires_grad_(False)
    before = weight.detach().clone()
    session.train_step(*batch)
    assert weight.grad is None
    session.optimizer_step()
    assert_same(weight, before)


@pytest.mark.parametrize("fused", [False, True])
def test_counts_beyond_float32_go_on(artifacts: toc.Artifacts, fused: bool, tmp_path: Path) -> None:
    model = toc.OrtModule(artifacts, threads=1)
    optimizer = toc.OrtOptimizer(model, lr=0.02, fused=fused)
    run(model, optimizer, 5, 7)  # FROZEN is frozen
    state = model.checkpoint(optimizer).clone()
    state.optimizer["group0"].step = (1 << 24) + 1
    toc.save(state, tmp_path / "c")
    model.load_checkpoint(tmp_path / "c", optimizer)
    run(model, optimizer, 10, 12)
    assert optimizer.checkpoint_step == (1 << 24) + 3
    other = toc.OrtOptimizer(model, fused=fused)
    other.load_state_dict(optimizer.state_dict())
    assert steps(other, model) == {name: 2 if name == FROZEN else (1 << 24) + 3 for name in model.named_trainable()}
