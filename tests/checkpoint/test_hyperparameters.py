"""Hyper-parameters on the way from ORT's optimizer graphs to `torch.optim`: carried along, or named in a warning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.truth import DATA

ADAMW = DATA / "fbv2_ort1_19_2_adamw_full"
SGD = DATA / "fbv2_ort1_19_2_sgd_full"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 16), nn.Linear(16, 5)
        self.norm = nn.ParameterDict({"gain": nn.Parameter(torch.zeros(()))})


def changed(folder: Path, **attributes: Any) -> toc.Artifacts:
    from tests.runtime.test_optimizer import with_optimizer

    return with_optimizer(folder, **attributes)


def loaded(state: toc.CheckpointState, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, Any]:
    optimizer.load_state_dict(toc.to_optimizer_state_dict(state, optimizer, **more))
    return optimizer.param_groups[0]


class TestABareFile:
    """ORT's file holds moments and step, and nothing of the graph."""

    def test_both_values_are_named(self) -> None:
        model, state = Net(), toc.load(ADAMW / "checkpoint")
        with pytest.warns(toc.CheckpointWarning) as caught:
            group = loaded(state, torch.optim.AdamW(model.parameters()), module=model)
        (message,) = (str(entry.message) for entry in caught)
        for part in ("eps=1e-08", "weight_decay=0.01", "eps=1e-06", "weight_decay=0.0", "artifacts="):
            assert part in message
        assert "betas" not in message
        assert group["eps"] == 1e-8

    def test_for_a_module_alone_too(self) -> None:
        with pytest.warns(toc.CheckpointWarning, match=r"eps=1e-08.*eps=1e-06"):
            toc.to_optimizer_state_dict(toc.load(ADAMW / "checkpoint"), Net())

    @pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
    def test_only_what_differs(self, kind: type) -> None:
        model = Net()
        with pytest.warns(toc.CheckpointWarning, match="weight_decay=0.3") as caught:
            loaded(toc.load(ADAMW / "checkpoint"), kind(model.parameters(), eps=1e-6, weight_decay=0.3), module=model)
        assert "eps" not in str(caught[0].message)

    def test_nothing_is_said_where_nothing_differs(self) -> None:
        model = Net()
        loaded(toc.load(ADAMW / "checkpoint"), torch.optim.AdamW(model.parameters(), eps=1e-6, weight_decay=0.0), module=model)
        loaded(toc.load(SGD / "checkpoint"), torch.optim.SGD(model.parameters()), module=model)

    def test_values_in_the_checkpoint_are_the_ones(self, tmp_path: Path) -> None:
        """From PyTorch and back through ORT's format."""
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9), eps=1e-5, weight_decay=0.2)
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
        toc.save(toc.from_torch(model, optimizer), tmp_path / "c")
        group = loaded(toc.load(tmp_path / "c"), torch.optim.AdamW(model.parameters()), module=model)
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-5, 0.2)


class TestWithArtifacts:
    @pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
    def test_they_are_carried_along(self, kind: type, tmp_path: Path) -> None:
        artifacts = changed(tmp_path, adam_mode=0, alpha=0.8, beta=0.95, epsilon=1e-5, weight_decay=0.25)
        model = Net()
        group = loaded(toc.load(ADAMW / "checkpoint"), kind(model.parameters(), lr=0.5), module=model, artifacts=artifacts)
        assert (group["betas"], group["eps"], group["weight_decay"], group["lr"]) == ((0.8, 0.95), 1e-5, 0.25, 0.5)
        assert group.get("decoupled_weight_decay", True)  # ORT's decay is decoupled, whatever the class

    def test_every_group_has_them_even_without_moments(self, tmp_path: Path) -> None:
        artifacts = changed(tmp_path, adam_mode=0, weight_decay=0.25)
        model = Net()
        optimizer = torch.optim.AdamW([{"params": model.fc1.parameters()}, {"params": [*model.fc2.parameters(), model.norm["gain"]]}])
        fresh = toc.load(ADAMW / "initial_checkpoint")
        optimizer.load_state_dict(toc.to_optimizer_state_dict(fresh, optimizer, module=model, artifacts=artifacts))
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.25]
        assert [group["eps"] for group in optimizer.param_groups] == [1e-6, 1e-6]

    def test_what_torch_has_not_is_named(self, tmp_path: Path) -> None:
        model = Net()
        with pytest.warns(toc.CheckpointWarning, match=r"adam_mode=1.*OrtOptimizer"):
            group = loaded(
                toc.load(ADAMW / "checkpoint"), torch.optim.AdamW(model.parameters()), module=model, artifacts=toc.Artifacts.load(ADAMW)
            )
        assert (group["eps"], group["weight_decay"]) == (1e-6, 0.0)
        clipping = changed(tmp_path, adam_mode=0, correct_bias=0, clip=0.5)
        with pytest.warns(toc.CheckpointWarning, match=r"correct_bias=False, max_norm=0\.5"):
            loaded(toc.load(ADAMW / "checkpoint"), torch.optim.AdamW(model.parameters()), module=model, artifacts=clipping)

    def test_sgd(self) -> None:
        model, artifacts = Net(), toc.Artifacts.load(SGD)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
        group = loaded(toc.load(SGD / "checkpoint"), optimizer, module=model, artifacts=artifacts)
        assert (group["weight_decay"], group["momentum"]) == (0.0, 0.0)
        with pytest.raises(toc.CheckpointError, match="SGD"):
            toc.to_optimizer_state_dict(toc.load(SGD / "checkpoint"), torch.optim.AdamW(model.parameters()), module=model)
        with pytest.raises(toc.CheckpointError, match="AdamW"):
            toc.to_optimizer_state_dict(toc.load(ADAMW / "checkpoint"), torch.optim.SGD(model.parameters()), module=model)
        with pytest.raises(toc.CheckpointError, match="AdamW"):
            toc.to_optimizer_state_dict(
                toc.load(ADAMW / "initial_checkpoint"),
                torch.optim.SGD(model.parameters()),
                module=model,
                artifacts=toc.Artifacts.load(ADAMW),
            )

    def test_artifacts_without_an_optimizer_are_an_error_when_given(self, tmp_path: Path) -> None:
        for name in ("training_model.onnx", "eval_model.onnx", "checkpoint"):
            (tmp_path / name).write_bytes((ADAMW / name).read_bytes())
        model = Net()
        with pytest.raises(toc.CheckpointError, match="optimizer_model"):
            loaded(
                toc.load(ADAMW / "checkpoint"), torch.optim.AdamW(model.parameters()), module=model, artifacts=toc.Artifacts.load(tmp_path)
            )


class TestOfOrtModules:
    def test_a_module_that_runs_the_graph_brings_them(self, tmp_path: Path) -> None:
        artifacts = changed(tmp_path, adam_mode=0, weight_decay=0.25)
        model = toc.OrtModule(artifacts, engine="torch")
        state = toc.load(ADAMW / "checkpoint")
        group = loaded(state, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), module=model)
        assert (group["eps"], group["weight_decay"]) == (1e-6, 0.25)
        (alone,) = toc.to_optimizer_state_dict(state, model)["param_groups"]
        assert (alone["eps"], alone["weight_decay"]) == (1e-6, 0.25)

    def test_ort_optimizers_have_them_already(self) -> None:
        model = toc.OrtModule(ADAMW, engine="torch")
        optimizer = toc.OrtOptimizer(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            group = loaded(toc.load(ADAMW / "checkpoint"), optimizer)
        assert (group["eps"], group["weight_decay"]) == (1e-6, 0.0)
        assert optimizer.checkpoint_step == 5
        sgd = toc.OrtOptimizer(toc.OrtModule(SGD, engine="torch"))
        loaded(toc.load(SGD / "checkpoint"), sgd)
        assert sgd.checkpoint_step == toc.load(SGD / "checkpoint").step > 0

    def test_its_checkpoints_bring_them_and_say_what_torch_has_not(self) -> None:
        model = toc.OrtModule(ADAMW, engine="torch")
        optimizer = toc.OrtOptimizer(model)
        optimizer.param_groups[0]["weight_decay"] = 0.5
        state, plain = model.checkpoint(optimizer), Net()
        with pytest.warns(toc.CheckpointWarning, match="adam_mode=1"):
            group = loaded(state, torch.optim.AdamW(plain.parameters()), module=plain)
        assert (group["eps"], group["weight_decay"]) == (1e-6, 0.5)

    def test_the_numbers_agree(self, tmp_path: Path) -> None:
        """The graph in PyTorch's clothes and `torch.optim.AdamW` take the same steps."""
        artifacts = changed(tmp_path, adam_mode=0, epsilon=1e-3, weight_decay=0.25)
        state = toc.load(ADAMW / "checkpoint")
        model = toc.OrtModule(toc.Artifacts.load(artifacts.folder, checkpoint=state), engine="torch")
        optimizer, plain = toc.OrtOptimizer(model, lr=0.1), Net()
        missing = plain.load_state_dict(toc.to_state_dict(state), strict=False)
        assert not missing.missing_keys
        adamw = torch.optim.AdamW(plain.parameters(), lr=0.1)
        adamw.load_state_dict(toc.to_optimizer_state_dict(state, adamw, module=plain, artifacts=artifacts))
        for number in range(5):
            generator = torch.Generator().manual_seed(number)
            for name, parameter in plain.named_parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                model.named_trainable()[name].grad = parameter.grad.clone()
            optimizer.step()
            adamw.step()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(parameter.detach(), model.named_tensors()[name].detach(), rtol=1e-5, atol=1e-6)


def test_half_a_kind_is_refused() -> None:
    """SGD's momentum is no first moment of Adam."""
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    sgd.step()
    state = toc.from_torch(model, sgd)
    with pytest.raises(toc.CheckpointError, match="SGD"):
        toc.to_optimizer_state_dict(state, torch.optim.AdamW(model.parameters()), module=model)
    adamw = torch.optim.AdamW(model.parameters())
    adamw.step()
    with pytest.raises(toc.CheckpointError, match="AdamW"):
        toc.to_optimizer_state_dict(toc.from_torch(model, adamw), torch.optim.SGD(model.parameters(), momentum=0.9), module=model)
