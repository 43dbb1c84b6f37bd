"""Modules and optimizers are recognized by their class: a user's class with methods of the same names is treated as any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.training.setups import assert_equal, data
from torch_ort_ckpt.checkpoint.training_graph import unwrap

ROOT = Path(__file__).parents[2]


class Lookalike(nn.Module):
    """Every method that an OrtModule has, none of which may be called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(x), y)

    def _never(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("taken for an OrtModule")

    load_checkpoint = seed_dropout = checkpoint = export_inference = fix_dimensions = set_requires_gradient_sync = _never


class Counting(torch.optim.SGD):
    """An attribute and a method with the names that OrtOptimizer and ZeroRedundancyOptimizer have."""

    updated = False

    def consolidate_state_dict(self, to: int = 0) -> None:
        raise AssertionError("taken for a ZeroRedundancyOptimizer")


def made(seed: int) -> tuple[Lookalike, Counting]:
    torch.manual_seed(seed)
    model = Lookalike()
    return model, Counting(model.parameters(), lr=0.1)


def test_the_runner_loads_trains_saves_and_resumes_it(tmp_path: Path) -> None:
    first, _ = made(1)
    toc.save(toc.from_torch(first), tmp_path / "start")
    model, optimizer = made(2)
    config = toc.RunnerConfig(1, checkpoint_to_load_path=tmp_path / "start")
    toc.TrainingRunner(model, torch.optim.SGD(model.parameters(), lr=0.0), config).run(data())
    assert_equal(model.state_dict(), first.state_dict())

    settings: dict[str, Any] = {"checkpoints_dir": tmp_path / "checkpoints", "gradient_accumulation_steps": 2}
    result = toc.TrainingRunner(model, optimizer, toc.RunnerConfig(8, **settings)).run(data())
    assert (result.weight_updates, result.skipped_updates) == (4, 0)
    again, other = made(3)
    toc.TrainingRunner(again, other, toc.RunnerConfig(8, **settings)).run(data())
    assert_equal(again.state_dict(), model.state_dict())


def test_it_can_t_export_itself_and_has_no_dimensions(tmp_path: Path) -> None:
    model, optimizer = made(1)
    with pytest.raises(toc.CheckpointError, match="can't export itself"):
        toc.TrainingRunner(model, optimizer, toc.RunnerConfig(1, export_path=tmp_path / "model.onnx"))
    with pytest.raises(toc.CheckpointError, match="no symbolic dimensions"):
        toc.TrainingRunner(model, optimizer, toc.RunnerConfig(1, mapped_dimensions={"batch": 4}))


def test_it_is_no_wrapper_of_another_module() -> None:
    model, _ = made(1)
    model.module = model._orig_mod = model.net
    assert unwrap(model) is model
    assert unwrap(nn.DataParallel(model)) is model
    assert unwrap(torch.compile(model, backend="eager")) is model


@pytest.mark.lightning
def test_lightning_takes_it_for_what_it_is() -> None:
    from torch_ort_ckpt.integrations.lightning import training_state

    root = nn.Module()
    root.net = Lookalike()
    optimizer = Counting(root.parameters(), lr=0.1)
    trainer = SimpleNamespace(lightning_module=root, optimizers=[optimizer], current_epoch=1, global_step=7)
    state = training_state(trainer)
    assert state.trainable.keys() == {"net.net.weight", "net.net.bias"}
    assert state.properties["global_step"] == 7


def test_training_a_plain_module_imports_no_onnx() -> None:
    program = "import torch_ort_ckpt.training.runner, sys; print('onnx' in sys.modules, 'torch._dynamo' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
