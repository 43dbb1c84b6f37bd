"""A folder without a training model: everything but training works."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from tests.models import batch, exported

pytestmark = pytest.mark.ort_any  # the artifacts are made by ORT's own tools

ENGINES = ["ort", "torch"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "artifacts"
    shutil.copytree(exported("mlp").folder, place)
    (place / "training_model.onnx").unlink()
    return place


@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_evaluated_moved_copied_and_saved(folder: Path, tmp_path: Path, engine: str) -> None:
    whole = toc.OrtModule(exported("mlp"), engine=engine, threads=1).eval()
    model = toc.OrtModule(folder, engine=engine, threads=1)
    inputs = batch("mlp")
    expected = whole(*inputs)
    torch.testing.assert_close(model.eval()(*inputs), expected, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(model.train()(*inputs), expected, rtol=0, atol=0)
    torch.testing.assert_close(toc.TrainingSession(folder, engine=engine).eval_step(*inputs), expected.detach(), rtol=0, atol=0)
    with torch.no_grad():
        model.fc1.weight.mul_(2)
    toc.save(model.checkpoint(), tmp_path / "saved")
    whole.load_checkpoint(tmp_path / "saved")
    torch.testing.assert_close(model.eval()(*inputs), whole(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_training_says_what_is_missing(folder: Path, engine: str) -> None:
    model = toc.OrtModule(folder, engine=engine, threads=1)
    for train in (model, model.train_step, toc.TrainingSession(folder, engine=engine).train_step):
        with pytest.raises(toc.CheckpointError, match=r"no training_model.*model\.eval\(\)"):
            train(*batch("mlp"))
    with pytest.raises(toc.CheckpointError, match="training_model"):
        toc.OrtOptimizer(model)
    with pytest.raises(toc.CheckpointError, match="training_model"):
        toc.TrainingSession(folder, engine=engine).optimizer_step()


def test_a_frozen_parameter_that_requires_a_gradient_is_refused_in_training_only(folder: Path) -> None:
    model = toc.OrtModule(exported("mlp", frozen="fc1.weight"), threads=1)
    model.fc1.weight.requires_grad_(True)
    model.eval()(*batch("mlp"))
    with pytest.raises(toc.CheckpointError, match=r"fc1\.weight: requires a gradient"):
        model.train()(*batch("mlp"))
