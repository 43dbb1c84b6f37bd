"""Artifacts in ORT's own format (`.ort`), which only ORT can read: they run as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

import torch_ort_ckpt as toc
from tests.models import batch, exported, in_ort_format
from tests.official import assert_same

pytestmark = pytest.mark.ort


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_ort_format("mlp", tmp_path_factory.mktemp("ort"))


def test_they_are_found_and_described(folder: Path) -> None:
    artifacts = toc.Artifacts.load(folder)
    assert artifacts.training_path == folder / "training_model.ort"
    assert [spec.name for spec in artifacts.inputs] == ["x", "labels"]
    assert artifacts.trainable == exported("mlp").trainable
    assert artifacts.missing() == []
    names = ["fc2.bias", "fc2.weight", "fc1.bias", "fc1.weight"]
    assert artifacts._module_order == exported("mlp")._module_order != ([], [])  # ORT keeps the note of the module's order
    assert artifacts.in_order(names) == names[::-1]


def test_they_train_like_the_onnx_models(folder: Path) -> None:
    ours, reference = toc.OrtModule(folder, threads=1), toc.OrtModule(exported("mlp"), threads=1)
    optimizers = [toc.OrtOptimizer(model, lr=0.01) for model in (ours, reference)]
    for seed in range(6):
        for model, optimizer in zip((ours, reference), optimizers, strict=True):
            for half in range(2):  # accumulating
                inputs = batch("mlp", seed=10 * seed + half)
                if seed % 2:
                    model(*inputs).backward()
                else:
                    model.train_step(*inputs)
            optimizer.step()
            optimizer.zero_grad()
    for name, value in reference.state_dict().items():
        assert_same(ours.state_dict()[name], value)
    assert_same(ours.eval()(*batch("mlp")), reference.eval()(*batch("mlp")))


def test_what_can_not_be_read_from_them_is_refused(folder: Path) -> None:
    model = toc.OrtModule(folder)
    with pytest.raises(toc.CheckpointError, match="can't be read"):
        toc.OrtOptimizer(model, fused=True)
    optimizer = toc.OrtOptimizer(model)
    with pytest.raises(toc.CheckpointError, match="can't be read"):
        optimizer.to_torch()
    optimizer.param_groups[0]["weight_decay"] = 0.5
    model.train_step(*batch("mlp"))
    with pytest.raises(toc.CheckpointError, match="can't be changed"):
        optimizer.step()
