"""What a step model's state holds: every tensor of the checkpoint, in its own type, and sums of gradients only while there are any."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.models import batch, module

from .test_step_model import artifacts
from .trainer import Trainer


class Spare(nn.Module):
    """Has a layer, a buffer and a flag that the loss does not depend on, and a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x).mean(1))


def save(trainer: Trainer, folder: Path, step: int) -> Path:
    from safetensors import safe_open
    from safetensors.numpy import save_file

    with safe_open(folder / "state.safetensors", "numpy") as file:
        metadata = file.metadata()
    save_file(trainer.state, folder / "trained.safetensors", {**metadata, "torch_ort_ckpt.step": str(step)})
    return folder / "trained.safetensors"


def test_tensors_that_the_loss_does_not_need_are_handed_through(tmp_path: Path) -> None:
    native = Spare()
    made = toc.export_artifacts(native, (torch.randn(2, 4),), tmp_path / "artifacts", frozen=["used.bias"])
    toc.export_step_model(made, tmp_path)
    trainer = Trainer(tmp_path)
    trainer.step(1, (torch.randn(2, 4), torch.tensor([0, 1])))
    state = toc.load(save(trainer, tmp_path, 1))
    assert set(state.trainable) == {"used.weight"}
    loaded = toc.to_state_dict(state)
    assert not torch.equal(loaded["used.weight"], native.used.weight)
    for name in ("used.bias", "spare.weight", "spare.bias", "table", "flag"):
        assert torch.equal(loaded[name], native.state_dict()[name])
    native.load_state_dict(loaded)


def test_tied_weights_are_one_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    native, x, y = Tied(), torch.randint(0, 10, (4, 3)), torch.randint(0, 10, (4,))
    toc.export_step_model(toc.export_artifacts(native, (x,), tmp_path / "artifacts"), tmp_path)
    trainer = Trainer(tmp_path)
    optimizer = torch.optim.AdamW(native.parameters(), lr=0.01)
    for step in range(1, 4):
        loss = F.cross_entropy(native(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert abs(float(trainer.step(step, (x, y))["loss"]) - loss.item()) < 1e-5
    state = toc.load(save(trainer, tmp_path, 3))
    fresh = Tied()
    fresh.load_state_dict(toc.to_state_dict(state, toc.NameMap.match(state, fresh)), strict=False)
    np.testing.assert_allclose(fresh.head.weight.detach(), native.head.weight.detach(), atol=1e-5)


@pytest.mark.parametrize(("accumulate", "max_norm"), [(1, None), (2, 0.05)])
def test_float64_parameters_have_float64_moments(accumulate: int, max_norm: float | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    native = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    made = toc.export_artifacts(native, (x,), tmp_path / "artifacts")
    toc.export_step_model(made, tmp_path, accumulate=accumulate, max_norm=max_norm)
    onnx.checker.check_model(onnx.load(tmp_path / "step_model.onnx"), full_check=True)
    trainer = Trainer(tmp_path, fused=False)  # 1.19 makes a fused operator that it has no float64 kernel for; 1.31 does not
    optimizer = torch.optim.AdamW(native.parameters(), lr=0.01)
    for number in range(4):
        loss = F.cross_entropy(native(x), y)
        loss.backward()
        assert abs(float(trainer.step(number // accumulate + 1, (x, y))["loss"]) - loss.item()) < 1e-6
        if (number + 1) % accumulate == 0:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(native.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    for name, value in native.named_parameters():
        assert trainer.state[f"{name}.momentum1"].dtype == np.float64
        np.testing.assert_allclose(trainer.state[name], value.detach(), atol=1e-7)


def test_sums_of_gradients_are_part_of_a_checkpoint_only_between_updates(tmp_path: Path) -> None:
    toc.export_step_model(artifacts("mlp"), tmp_path, accumulate=2)
    trainer, values = Trainer(tmp_path), batch("mlp")
    assert {"fc1.weight.accumulated", "accumulated.count"} <= set(trainer.state)
    trainer.step(1, values)
    between = toc.load(save(trainer, tmp_path, 0))
    assert int(between.frozen["accumulated.count"]) == 1
    toc.export_step_model(artifacts("mlp"), tmp_path / "again", accumulate=2, checkpoint=between)
    again = Trainer(tmp_path / "again")
    assert again.state.keys() == trainer.state.keys()
    assert all(np.array_equal(again.state[name], value) for name, value in trainer.state.items())
    with pytest.raises(toc.CheckpointError, match="sums of gradients that no update has used"):
        toc.export_step_model(artifacts("mlp"), tmp_path / "plain", checkpoint=between)
    trainer.step(1, values)
    after = toc.load(save(trainer, tmp_path, 1))
    module("mlp").load_state_dict(toc.to_state_dict(after))
    toc.export_step_model(artifacts("mlp"), tmp_path / "plain", checkpoint=after)
    assert set(Trainer(tmp_path / "plain").state) == {name for name in trainer.state if "accumulated" not in name}


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    toc.export_step_model(artifacts("mlp"), tmp_path)
    trainer = Trainer(tmp_path)
    trainer.step(1, batch("mlp"))
    trained = toc.load(save(trainer, tmp_path, 1))
    momentum = torch.optim.SGD(module("mlp").parameters(), momentum=0.9)
    with pytest.raises(toc.CheckpointError, match="moments of another optimizer"):
        toc.export_step_model(artifacts("mlp"), tmp_path / "sgd", optimizer=momentum, checkpoint=trained)
    trained.optimizer["group0"].states["fc1.bias"]["step"] = torch.tensor(7)
    with pytest.raises(toc.CheckpointError, match="several steps"):
        toc.export_step_model(artifacts("mlp"), tmp_path / "steps", checkpoint=trained)
    trained.optimizer.clear()
    trained.trainable["fc1.bias"] = torch.zeros(3)
    with pytest.raises(toc.CheckpointError, match=re.escape("shape (3,) in the checkpoint and (16,) in the graph")):
        toc.export_step_model(artifacts("mlp"), tmp_path / "shape", checkpoint=trained)


@pytest.mark.parametrize("name", ["lr", "step", "seed", "loss"])
def test_names_of_the_contract_are_refused(name: str, tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.ones(3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * getattr(self, name)

    made = toc.export_artifacts(Named(), (torch.ones(2, 3),), tmp_path / "artifacts", loss="mse")
    with pytest.raises(toc.CheckpointError, match=f"would be called '{name}'"):
        toc.export_step_model(made, tmp_path / "step")


def test_a_name_that_ends_like_a_result_is_allowed_if_it_does_not_clash(tmp_path: Path) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Module()
            self.x.new = nn.Parameter(torch.full((3,), 2.0))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value * self.x.new

    made = toc.export_artifacts(Inner(), (torch.ones(2, 3),), tmp_path / "fine", loss="mse")
    toc.export_step_model(made, tmp_path / "step")
    assert "x.new.new" in Trainer(tmp_path / "step").outputs


def test_the_model_says_nothing_of_the_machine(tmp_path: Path) -> None:
    toc.export_step_model(artifacts("cnn"), tmp_path)
    content = (tmp_path / "step_model.onnx").read_bytes()
    assert b"com.microsoft" not in content
    assert str(Path(__file__).parents[3]).encode() not in content
    assert str(Path(torch.__file__).parent).encode() not in content
    model = onnx.load(tmp_path / "step_model.onnx")
    read = {name for node in model.graph.node for name in node.input}
    assert not [tensor.name for tensor in model.graph.initializer if tensor.name not in read]
