"""States to and from PyTorch, with `torch.optim` itself as the judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.truth import Truth


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = model(torch.rand(6, 4, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def assert_same_training(a: nn.Module, b: nn.Module) -> None:
    assert all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("format", ["ort", "safetensors", "torch"])
def test_training_goes_on_to_the_same_bits_after_a_round_trip(kind: str, format: str, tmp_path: Path) -> None:
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, 3)
    toc.save(toc.from_torch(model, optimizer), tmp_path / "checkpoint", format=format)

    state = toc.load(tmp_path / "checkpoint")
    again = network()
    again.load_state_dict(toc.to_state_dict(state))
    resumed = torch.optim.SGD(again.parameters()) if kind.startswith("sgd") else type(optimizer)(again.parameters())
    resumed.load_state_dict(toc.to_optimizer_state_dict(state, resumed, module=again))
    train(model, optimizer, 3, seed=2)
    train(again, resumed, 3, seed=2)
    assert_same_training(model, again)


def test_nothing_is_copied() -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 1)
    state = toc.from_torch(model, optimizer)
    assert state.trainable["0.weight"].data_ptr() == model[0].weight.data_ptr()
    assert state.frozen["1.running_mean"].data_ptr() == model[1].running_mean.data_ptr()
    moment = state.optimizer["group0"].states["0.weight"]["momentum0"]
    assert moment.data_ptr() == optimizer.state[model[0].weight]["exp_avg"].data_ptr()
    assert toc.to_state_dict(state)["0.weight"].data_ptr() == model[0].weight.data_ptr()
    back = toc.to_optimizer_state_dict(state, optimizer, module=model)
    assert back["state"][0]["exp_avg"].data_ptr() == moment.data_ptr()


def test_trainable_and_frozen_follow_requires_grad_and_buffers() -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    state = toc.from_torch(model)
    assert "0.bias" in state.frozen
    assert "1.num_batches_tracked" in state.frozen
    assert "0.weight" in state.trainable
    assert not any(value.requires_grad for value in state.parameters.values())


def test_the_group_holds_rate_step_and_hyperparameters() -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, 2)
    schedule.step()
    group = toc.from_torch(model, optimizer).optimizer["group0"]
    assert (group.step, group.lr, group.initial_lr) == (2, 0.005, 0.01)
    assert group.hyperparameters["betas"] == [0.8, 0.95]
    assert group.hyperparameters["weight_decay"] == 0.1
    assert group.states["0.weight"].keys() == {"momentum0", "momentum1"}


def test_steps_that_differ_are_kept_per_parameter() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    optimizer.state[model[0].bias]["step"].fill_(1)
    state = toc.from_torch(model, optimizer)
    assert state.step == 2
    assert state.optimizer["group0"].states["0.bias"]["step"] == 1
    back = toc.to_optimizer_state_dict(state, optimizer, module=model)
    assert [float(back["state"][n]["step"]) for n in range(3)] == [2, 1, 2]


def test_a_step_that_float32_can_not_hold_is_kept() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    state = toc.from_torch(model, optimizer)
    state.optimizer["group0"].step = (1 << 24) + 1
    optimizer.load_state_dict(toc.to_optimizer_state_dict(state, optimizer, module=model))
    train(model, optimizer, 1)
    assert toc.from_torch(model, optimizer).step == (1 << 24) + 2


class TestSeveralGroups:
    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network()
        decayed = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim == 1]
        optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.5}])
        train(model, optimizer, 2)
        return model, optimizer

    @pytest.mark.parametrize("format", ["safetensors", "torch"])
    def test_are_kept_apart_where_the_format_can(self, format: str, tmp_path: Path) -> None:
        model, optimizer = self.trained()
        toc.save(toc.from_torch(model, optimizer), tmp_path / "c", format=format)
        state = toc.load(tmp_path / "c")
        assert [group.lr for group in state.optimizer.values()] == [0.001, 0.5]
        back = toc.to_optimizer_state_dict(state, optimizer, module=model)
        assert [group["weight_decay"] for group in back["param_groups"]] == [0.1, 0.0]
        optimizer.load_state_dict(back)

    def test_are_refused_by_ort_unless_merged(self, tmp_path: Path) -> None:
        model, optimizer = self.trained()
        state = toc.from_torch(model, optimizer)
        with pytest.raises(toc.CheckpointError, match="one optimizer group"):
            toc.save(state, tmp_path / "c")
        with pytest.warns(toc.CheckpointWarning, match="lr"):
            toc.save(state, tmp_path / "c", groups="merge")
        merged = toc.load(tmp_path / "c")
        assert list(merged.optimizer) == ["group0"]
        assert merged.optimizer["group0"].states.keys() == dict(model.named_parameters()).keys()

    def test_can_be_kept_in_an_ort_file_for_ourselves(self, tmp_path: Path) -> None:
        state = toc.from_torch(*self.trained())
        toc.save(state, tmp_path / "c", groups="keep")
        assert toc.load(tmp_path / "c") == state

    def test_an_optimizer_that_mixes_them_is_refused(self) -> None:
        model, optimizer = self.trained()
        with pytest.raises(toc.CheckpointError, match="mixes the checkpoint's groups group0, group1"):
            toc.to_optimizer_state_dict(toc.from_torch(model, optimizer), torch.optim.AdamW(model.parameters()), module=model)


class TestOptimizerNames:
    def test_from_named_parameters(self) -> None:
        model = network()
        optimizer = torch.optim.AdamW(model.named_parameters())
        train(model, optimizer, 1)
        state = toc.from_torch(model.state_dict(), optimizer)
        assert state.optimizer["group0"].states.keys() == dict(model.named_parameters()).keys()
        assert "1.running_mean" in state.frozen
        assert len(toc.to_optimizer_state_dict(state, optimizer)["state"]) == 6

    def test_from_values_when_the_model_is_already_loaded(self) -> None:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_()  # fresh BatchNorm biases are all zero, hence alike
        train(model, optimizer, 1)
        state = toc.from_torch(model, optimizer)
        assert len(toc.to_optimizer_state_dict(state, optimizer)["state"]) == 6

    def test_a_stranger_is_refused_with_the_way_out(self) -> None:
        state = toc.from_torch(network())
        other = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        with pytest.raises(toc.CheckpointError, match="Pass module="):
            toc.to_optimizer_state_dict(state, torch.optim.AdamW(other.parameters()))
        with pytest.raises(toc.CheckpointError, match="not the module's"):
            toc.from_torch(network(), torch.optim.AdamW(other.parameters()))

    def test_a_module_alone_gives_one_group_of_the_right_kind(self) -> None:
        model = network()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        train(model, optimizer, 2)
        built = toc.to_optimizer_state_dict(toc.from_torch(model, optimizer), model)
        fresh = torch.optim.AdamW(model.parameters())
        fresh.load_state_dict(built)
        assert fresh.param_groups[0]["betas"] == (0.8, 0.95)
        sgd = OPTIMIZERS["sgd-momentum"](model.parameters())
        train(model, sgd, 1)
        assert "momentum_buffer" in toc.to_optimizer_state_dict(toc.from_torch(model, sgd), model)["state"][0]


def test_a_real_ort_checkpoint_loads_into_adamw() -> None:
    state = toc.load(Truth("fbv2_ort1_19_2_adamw_full").checkpoint)
    model = nn.ModuleDict({"fc1": nn.Linear(12, 16), "fc2": nn.Linear(16, 5)})
    model["norm"] = nn.ParameterDict({"gain": nn.Parameter(torch.zeros(()))})
    missing = model.load_state_dict(toc.to_state_dict(state), strict=False)
    assert not missing.missing_keys
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    artifacts = toc.Artifacts.load(Truth("fbv2_ort1_19_2_adamw_full").folder)
    with pytest.warns(toc.CheckpointWarning, match="adam_mode=1"):
        optimizer.load_state_dict(toc.to_optimizer_state_dict(state, optimizer, module=model, artifacts=artifacts))
    moments = optimizer.state[model["fc1"].weight]
    assert float(moments["step"]) == 5
    assert torch.equal(moments["exp_avg_sq"], state.optimizer["group0"].states["fc1.weight"]["momentum1"])
    assert optimizer.param_groups[0]["lr"] == 0.25  # ORT's file does not know the rate


class TestLike:
    def test_training_goes_back_under_the_names_it_came_from(self) -> None:
        model = network()
        came = toc.CheckpointState(
            {
                ("onnx::MatMul_1" if name == "0.weight" else name): (
                    p.detach().T.contiguous() if name == "0.weight" else p.detach().clone()
                )
                for name, p in model.named_parameters()
            },
            {name: b.clone() for name, b in model.named_buffers()},
            properties={"epoch": 3},
        )
        came.mixed_precision["3.weight"] = came.trainable["3.weight"].half()
        names = toc.NameMap.match(came, model)
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, 2)
        state = toc.from_torch(model, optimizer, names=names, like=came)
        assert state.trainable.keys() == came.trainable.keys()
        assert torch.equal(state.trainable["onnx::MatMul_1"], model[0].weight.T)
        assert state.optimizer["group0"].states["onnx::MatMul_1"]["momentum0"].shape == (4, 8)
        assert state.properties == {"epoch": 3}
        assert state.stale_aliases() == []
        back = toc.to_optimizer_state_dict(state, optimizer, names, module=model)
        assert torch.equal(back["state"][0]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])

    def test_what_is_missing_or_misshapen_is_named(self) -> None:
        like = toc.CheckpointState({"w": torch.zeros(2), "v": torch.zeros(9)})
        with pytest.raises(toc.CheckpointError, match="nothing found for 1 weights of `like`: v"):
            toc.from_torch({"w": torch.zeros(2)}, like=like)
        with pytest.raises(toc.CheckpointError, match="shape"):
            toc.from_torch({"w": torch.zeros(3)}, names=toc.NameMap.identity(), like=toc.CheckpointState({"w": torch.zeros(2)}))

    def test_a_nominal_checkpoint_is_completed(self) -> None:
        truth = Truth("fbv2_ort1_19_2_nominal")
        full = toc.load(truth.folder / "complete_checkpoint")
        completed = toc.from_torch(toc.to_state_dict(full), like=toc.load(truth.checkpoint))
        assert completed == full


class TestToStateDict:
    state = toc.CheckpointState(
        {"w": torch.tensor([1 / 3]), "h_fp16": torch.tensor([0.5]).half()},
        {"n": torch.tensor([7])},
        mixed_precision={"w": torch.tensor([1 / 3]).half()},
    )

    def test_aliases_are_left_out_unless_asked_for(self) -> None:
        assert toc.to_state_dict(self.state).keys() == {"w", "h_fp16", "n"}
        assert toc.to_state_dict(self.state, include_mixed_precision=True).keys() == {"w", "w_fp16", "h_fp16", "n"}

    def test_dtype_converts_floats_and_uses_the_alias(self) -> None:
        half = toc.to_state_dict(self.state, dtype=torch.float16)
        assert half["w"] is self.state.mixed_precision["w"]
        assert half["n"].dtype == torch.int64

    def test_upcast_says_what_it_did(self) -> None:
        with pytest.warns(toc.CheckpointWarning, match="upcast from half precision.*: h"):
            result = toc.to_state_dict(self.state, upcast_half=True)
        assert result["h"].dtype == torch.float32
        assert "h_fp16" in self.state.trainable

    def test_strings_are_left_out_with_a_warning(self) -> None:
        state = toc.CheckpointState(frozen={"vocab": np.array(["a"], dtype=object)})
        with pytest.warns(toc.CheckpointWarning, match="vocab"):
            assert toc.to_state_dict(state) == {}


def test_wrapped_modules_give_plain_names() -> None:
    model = network()
    state = toc.from_torch(nn.DataParallel(model))
    assert "0.weight" in state.trainable
    assert "0.weight" in toc.from_torch(torch.compile(model)).trainable


def test_a_state_dict_of_something_else_is_refused() -> None:
    with pytest.raises(toc.CheckpointError, match="not a state dict of tensors: 'epoch'"):
        toc.from_torch({"epoch": 3})


def test_a_view_in_a_state_dict_is_not_taken_for_the_parameter_it_shares_memory_with() -> None:
    """`row` starts at the address of `weight`, and comes later."""
    weight = nn.Parameter(torch.arange(6.0).reshape(3, 2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.sum().backward()
    optimizer.step()
    state = toc.from_torch({"weight": weight.detach(), "row": weight.detach()[:1]}, optimizer)
    assert list(state.trainable) == ["weight"]
    assert list(state.frozen) == ["row"]
    (group,) = state.optimizer.values()
    assert list(group.states) == ["weight"]
