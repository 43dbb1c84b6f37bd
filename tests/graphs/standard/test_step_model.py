"""Step models: a whole training step as one graph of standard operators, against PyTorch and in any onnxruntime."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.models import batch, module
from tests.truth import Truth
from torch_ort_ckpt.cli import main

from .trainer import Trainer

NAMES = ("mlp", "cnn", "transformer")
ADAMW = toc.OptimizerSpec("AdamW", eps=1e-3, weight_decay=0.01)
"""With a large eps: a gradient that is zero but for rounding (a bias before a norm) would otherwise move its parameter anywhere."""
NATIVE = functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.01)


@functools.cache
def artifacts(name: str, optimizer: str | toc.OptimizerSpec = ADAMW) -> toc.Artifacts:
    folder = tempfile.mkdtemp()
    return toc.export_artifacts(module(name), batch(name)[:1], Path(folder) / name, optimizer=optimizer)


def compare_with_torch(folder: Path, name: str, optimizer: Any, accumulate: int = 1, max_norm: float | None = None) -> None:
    trainer, native = Trainer(folder), module(name)
    updater = optimizer(native.parameters())
    for number in range(6 * accumulate):
        values = batch(name)
        loss = F.cross_entropy(native(values[0]), values[1])
        loss.backward()
        found = trainer.step(number // accumulate + 1, values)
        assert abs(float(next(iter(found.values()))) - loss.item()) < 1e-5
        if (number + 1) % accumulate == 0:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(native.parameters(), max_norm)
            updater.step()
            updater.zero_grad()
    for key, value in native.state_dict().items():
        np.testing.assert_allclose(trainer.state[key], value.numpy(), rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_of_standard_operators_trains_as_pytorch_does(name: str, tmp_path: Path) -> None:
    toc.export_step_model(artifacts(name), tmp_path / "step")
    model = onnx.load(tmp_path / "step" / "step_model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert {item.domain for item in model.opset_import} <= {"", "ai.onnx"}
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    compare_with_torch(tmp_path / "step", name, NATIVE)


def test_gradients_of_several_batches_are_added_up(tmp_path: Path) -> None:
    toc.export_step_model(artifacts("cnn"), tmp_path / "step", accumulate=3)
    compare_with_torch(tmp_path / "step", "cnn", NATIVE, accumulate=3)


def test_gradients_are_clipped(tmp_path: Path) -> None:
    toc.export_step_model(artifacts("mlp"), tmp_path / "step", max_norm=0.05)
    compare_with_torch(tmp_path / "step", "mlp", NATIVE, max_norm=0.05)


@pytest.mark.parametrize(
    "settings",
    [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"weight_decay": 0.1}],
    ids=["momentum", "nesterov", "decay"],
)
def test_sgd_may_have_what_the_kernel_of_the_training_api_has_not(settings: dict[str, Any], tmp_path: Path) -> None:
    source = torch.optim.SGD(module("mlp").parameters(), lr=0.01, **settings)
    with pytest.raises(toc.CheckpointError, match="no momentum and no weight decay"):
        toc.export_artifacts(module("mlp"), batch("mlp")[:1], tmp_path / "refused", optimizer=source)
    toc.export_step_model(artifacts("mlp"), tmp_path / "step", optimizer=source)
    compare_with_torch(tmp_path / "step", "mlp", functools.partial(torch.optim.SGD, lr=0.01, **settings))


def test_adam_has_its_own_weight_decay(tmp_path: Path) -> None:
    source = torch.optim.Adam(module("mlp").parameters(), weight_decay=0.1)
    with pytest.raises(toc.CheckpointError, match="no Adam with weight decay"):
        toc.export_artifacts(module("mlp"), batch("mlp")[:1], tmp_path / "refused", optimizer=source)
    toc.export_step_model(artifacts("mlp", "adam"), tmp_path / "step", optimizer=source)
    compare_with_torch(tmp_path / "step", "mlp", functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.1))


def test_dropout_takes_a_seed(tmp_path: Path) -> None:
    toc.export_step_model(artifacts("dropout"), tmp_path)
    values = batch("dropout")

    def loss(seed: int) -> float:
        return float(Trainer(tmp_path).step(1, values, seed=seed)["loss"])

    assert loss(1) == loss(1)
    assert len({loss(seed) for seed in range(4)}) == 4


def test_the_state_is_a_checkpoint_back_and_forth(tmp_path: Path) -> None:
    toc.export_step_model(artifacts("cnn"), tmp_path)
    trainer = Trainer(tmp_path)
    for number in range(1, 4):
        trainer.step(number, batch("cnn"))
    from safetensors import safe_open
    from safetensors.numpy import save_file

    with safe_open(tmp_path / "state.safetensors", "numpy") as file:
        metadata = file.metadata()
    assert metadata["torch_ort_ckpt.step"] == "0"
    save_file(trainer.state, tmp_path / "trained.safetensors", {**metadata, "torch_ort_ckpt.step": "3", "torch_ort_ckpt.lr": "0.01"})
    state = toc.load(tmp_path / "trained.safetensors")
    (group,) = state.optimizer.values()
    assert (group.step, group.lr) == (3, 0.01)
    assert set(state.trainable) == set(dict(module("cnn").named_parameters()))
    for name, moments in group.states.items():
        for kind, value in moments.items():
            assert np.array_equal(np.asarray(value), trainer.state[f"{name}.{kind}"])
    toc.convert(tmp_path / "trained.safetensors", tmp_path / "checkpoint", to_format="ort")
    toc.export_step_model(artifacts("cnn"), tmp_path / "again", checkpoint=toc.load(tmp_path / "checkpoint"))
    again = Trainer(tmp_path / "again")
    assert again.state.keys() == trainer.state.keys()
    assert all(np.array_equal(again.state[name], value) for name, value in trainer.state.items())
    model = toc.OrtModule(artifacts("cnn"), engine="torch")
    optimizer = toc.OrtOptimizer(model)
    model.load_checkpoint(toc.load(tmp_path / "checkpoint"), optimizer)
    values = batch("cnn")
    loss = model(*values)
    loss.backward()
    optimizer.step()
    assert abs(float(again.step(4, values)["loss"]) - loss.item()) < 1e-5
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(again.state[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_names_that_clash_are_refused(tmp_path: Path) -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.step

    made = toc.export_artifacts(Clash(), (torch.ones(2, 3),), tmp_path / "artifacts", loss="mse")
    with pytest.raises(toc.CheckpointError, match="would be called 'step'"):
        toc.export_step_model(made, tmp_path / "step")
    assert not (tmp_path / "step" / "step_model.onnx").exists()


def test_graphs_that_ort_made_are_rebuilt(tmp_path: Path) -> None:
    truth = Truth("fbv2_ort1_19_2_adamw_full")
    toc.export_step_model(truth.folder, tmp_path / "step")
    model = onnx.load(tmp_path / "step" / "step_model.onnx")
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    trainer, resume = Trainer(tmp_path / "step"), truth.json["resume"]
    (group,) = toc.load(tmp_path / "step" / "state.safetensors").optimizer.values()
    for number, expected in enumerate(resume["losses"]):
        values = [torch.as_tensor(truth.arrays[f"x_resume_{kind}{number}"]) for kind in ("in", "target")]
        found = trainer.step(group.step + number + 1, values, lr=resume["learning_rate"])
        assert abs(float(next(iter(found.values()))) - expected) < 1e-5


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(artifacts("mlp").folder)
    assert main(["step-model", folder, str(tmp_path / "step"), "--accumulate", "2", "--optimizer", "sgd"]) == 0
    assert "step_model.onnx" in capsys.readouterr().out
    assert main(["step-model", folder, str(tmp_path / "step")]) == 2
    assert "already holds a step model" in capsys.readouterr().err
    assert main(["step-model", folder, str(tmp_path / "step"), "--overwrite"]) == 0
    assert main(["step-model", folder, str(tmp_path / "other"), "--accumulate", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_javascript_module_reads_and_writes_the_state(tmp_path: Path) -> None:
    toc.export_step_model(artifacts("mlp"), tmp_path)
    module_path = Path(__file__).parents[3] / "examples" / "browser" / "step_trainer.js"
    shutil.copy(module_path, tmp_path / "step_trainer.mjs")
    code = """
import { readFileSync, writeFileSync } from "node:fs";
import { readSafetensors, writeSafetensors } from "./step_trainer.mjs";
const { tensors, metadata } = readSafetensors(readFileSync("state.safetensors"));
for (const value of tensors.values()) if (value.type === "float32") value.data = value.data.map((x) => x + 1);
writeFileSync("written.safetensors", writeSafetensors(tensors, { ...metadata, "torch_ort_ckpt.step": "7" }));
"""
    (tmp_path / "run.mjs").write_text(code)
    subprocess.run(["node", "run.mjs"], cwd=tmp_path, check=True, timeout=300)
    before, after = toc.load(tmp_path / "state.safetensors"), toc.load(tmp_path / "written.safetensors")
    (group,) = after.optimizer.values()
    assert group.step == 7
    assert before.parameters.keys() == after.parameters.keys()
    for name, value in before.trainable.items():
        assert torch.equal(torch.as_tensor(after.trainable[name]), torch.as_tensor(value) + 1)
