"""`Artifacts`: finding the four files, describing them, and saying what is missing."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import onnx
import pytest
import torch

import torch_ort_ckpt as toc
from tests.official import artifact_folders
from tests.truth import DATA

ADAMW = DATA / "fbv2_ort1_19_2_adamw_full"


def copy(source: Path, folder: Path, prefix: str = "", names: tuple[str, ...] = ()) -> Path:
    for path in source.iterdir():
        if path.name in names or (not names and path.suffix in (".onnx", "") and path.is_file()):
            shutil.copy(path, folder / f"{prefix}{path.name}")
    return folder


@pytest.mark.parametrize("name", artifact_folders())
def test_every_fixture_is_described(name: str) -> None:
    artifacts = toc.Artifacts.load(DATA / name)
    assert [spec.name for spec in artifacts.inputs] == ["x", "labels"]
    assert artifacts.inputs[0].shape == ("batch", 12)
    assert artifacts.dimensions == ["batch"]
    assert artifacts.trainable == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "norm.gain"]
    assert set(artifacts.trainable) == artifacts.state.trainable.keys()
    assert artifacts.parameters.keys() == artifacts.state.parameters.keys()
    assert "loss" in artifacts.loss
    assert artifacts.optimizer_spec.kind == ("SGD" if "sgd" in name else "AdamW")
    assert artifacts.gradients["fc1.weight"].name == "fc1.weight_grad.accumulation.buffer"
    text = artifacts.describe()
    assert "trainable  fc1.weight: float32[16, 12]" in text
    assert "symbolic dimensions: batch" in text


def test_hyper_parameters_are_read_from_the_graph() -> None:
    spec = toc.Artifacts.load(ADAMW).optimizer_spec
    assert spec == toc.OptimizerSpec("AdamW", betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, adam_mode=1)
    assert spec.moments == 2


def test_prefixes(tmp_path: Path) -> None:
    copy(ADAMW, tmp_path, "small_")
    assert toc.Artifacts.load(tmp_path).prefix == "small_"
    assert toc.Artifacts.load(tmp_path).checkpoint_path == tmp_path / "small_checkpoint"
    copy(DATA / "fbv2_ort1_19_2_sgd_full", tmp_path, "other_")
    with pytest.raises(toc.CheckpointError, match=r"prefixes 'other_', 'small_'.* Pass prefix="):
        toc.Artifacts.load(tmp_path)
    assert toc.Artifacts.load(tmp_path, prefix="other_").optimizer_spec.kind == "SGD"


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match="no such folder"):
        toc.Artifacts.load(tmp_path / "nowhere")
    with pytest.raises(toc.CheckpointError, match="neither training_model nor eval_model"):
        toc.Artifacts.load(tmp_path)
    copy(ADAMW, tmp_path, names=("training_model.onnx",))
    artifacts = toc.Artifacts.load(tmp_path)
    missing = "\n".join(artifacts.missing())
    assert "eval_model.onnx (needed for eval() and no_grad())" in missing
    assert "optimizer_model.onnx (needed for OrtOptimizer)" in missing
    assert "checkpoint (the parameters' values)" in missing
    assert [spec.name for spec in artifacts.inputs] == ["x", "labels"]  # by ORT's order of inputs
    assert "missing" in artifacts.describe()
    with pytest.raises(toc.CheckpointError, match="no checkpoint next to the models"):
        _ = artifacts.state
    with pytest.raises(toc.CheckpointError, match="no optimizer_model"):
        _ = artifacts.optimizer_spec
    with pytest.raises(toc.CheckpointError, match="no such checkpoint"):
        toc.Artifacts.load(tmp_path, checkpoint=tmp_path / "else")


def test_another_run_s_checkpoint_is_refused(tmp_path: Path) -> None:
    state = toc.CheckpointState(trainable={"other.weight": torch.ones(2)})
    with pytest.raises(toc.CheckpointError, match=r"has no fc1\.bias.*which the training graph trains"):
        _ = toc.Artifacts.load(ADAMW, checkpoint=state).parameters


def test_unreadable_models_are_refused(tmp_path: Path) -> None:
    copy(ADAMW, tmp_path)
    (tmp_path / "training_model.onnx").write_bytes(b"not a model at all")
    with pytest.raises(toc.CheckpointError, match="not an ONNX model"):
        _ = toc.Artifacts.load(tmp_path).training
    (tmp_path / "training_model.onnx").unlink()
    (tmp_path / "training_model.onnx").mkdir()
    assert toc.Artifacts.load(tmp_path).training_path is None


def test_models_with_external_data(tmp_path: Path) -> None:
    copy(ADAMW, tmp_path)
    for name in ("training_model.onnx", "eval_model.onnx"):
        model = onnx.load(tmp_path / name)
        onnx.save(model, tmp_path / name, save_as_external_data=True, location=f"{name}.data", size_threshold=0)
        assert (tmp_path / f"{name}.data").exists()
    artifacts = toc.Artifacts.load(tmp_path)
    assert artifacts.trainable == toc.Artifacts.load(ADAMW).trainable
    assert artifacts.training.SerializeToString() == onnx.load(tmp_path / "training_model.onnx").SerializeToString()


def test_artifacts_travel_without_their_files(tmp_path: Path) -> None:
    copy(ADAMW, tmp_path)
    data = pickle.dumps(toc.Artifacts.load(tmp_path))
    shutil.rmtree(tmp_path)
    artifacts = pickle.loads(data)
    assert artifacts.trainable == toc.Artifacts.load(ADAMW).trainable
    assert artifacts.optimizer_spec.kind == "AdamW"
