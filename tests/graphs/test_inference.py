"""`export_inference`: plain onnxruntime runs the trained model and gives what the eval graph gives."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import torch_ort_ckpt as toc
from tests.disks import failing
from tests.models import batch, exported, module
from tests.official import assert_same
from torch_ort_ckpt.graphs import inference

pytestmark = pytest.mark.ort


def run(path: Path, **inputs: torch.Tensor) -> list[Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    assert {value.name for value in session.get_inputs()} == inputs.keys()
    return session.run(None, {name: value.numpy() for name, value in inputs.items()})


def trained(name: str, **options: Any) -> toc.OrtModule:
    model = toc.OrtModule(exported(name, **options), threads=1)
    optimizer = toc.OrtOptimizer(model, lr=0.05)
    for seed in range(3):
        model.train_step(*batch(name, seed=seed))
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "lstm", "dropout"])
def test_outputs_equal_the_eval_graph_s_and_labels_are_gone(name: str, tmp_path: Path) -> None:
    model = trained(name, extra_outputs=True)
    x, y = batch(name, seed=9)
    loss, logits = model(x, y)
    model.export_inference(tmp_path / "model.onnx")
    (found,) = run(tmp_path / "model.onnx", x=x)
    torch.testing.assert_close(torch.from_numpy(found), logits, rtol=1e-6, atol=1e-6)
    model.export_inference(tmp_path / "with_loss.onnx", [model.artifacts.loss, "output"])
    found_loss, found = run(tmp_path / "with_loss.onnx", x=x, labels=y)
    torch.testing.assert_close(torch.as_tensor(found_loss).reshape(()), loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.from_numpy(found), logits, rtol=1e-6, atol=1e-6)
    native = module(name).eval()
    native.load_state_dict(model.state_dict())
    torch.testing.assert_close(torch.from_numpy(found), native(x).detach(), rtol=1e-4, atol=1e-4)


def test_any_value_inside_the_graph_can_be_asked_for(tmp_path: Path) -> None:
    model = trained("mlp")
    assert [spec.name for spec in model.artifacts.eval_outputs] == [model.artifacts.loss]
    x, _ = batch("mlp")
    model.export_inference(tmp_path / "model.onnx", ["output"])
    (found,) = run(tmp_path / "model.onnx", x=x)
    native = module("mlp")
    native.load_state_dict(model.state_dict())
    torch.testing.assert_close(torch.from_numpy(found), native(x).detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(toc.CheckpointError, match="computes no 'nothing'"):
        model.export_inference(tmp_path / "other.onnx", ["nothing"])
    onnx.checker.check_model(str(tmp_path / "model.onnx"))


def test_large_weights_go_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained("mlp", extra_outputs=True)
    x, _ = batch("mlp")
    model.export_inference(tmp_path / "inline.onnx")
    monkeypatch.setattr(inference, "INLINE_LIMIT", 0)
    model.export_inference(tmp_path / "model.onnx")
    assert len(list(tmp_path.glob("model.onnx.*.data"))) == 1
    assert (tmp_path / "model.onnx").stat().st_size < (tmp_path / "inline.onnx").stat().st_size
    assert_same(run(tmp_path / "model.onnx", x=x)[0], run(tmp_path / "inline.onnx", x=x)[0])


def test_equal_to_ort_s_own_export(tmp_path: Path) -> None:
    from tests.official import Official

    model = trained("mlp")
    official = Official(model.artifacts, tmp_path, state=model.checkpoint())
    official.module.export_model_for_inferencing(str(tmp_path / "theirs.onnx"), ["output"])
    model.export_inference(tmp_path / "ours.onnx", ["output"])
    x, _ = batch("mlp")
    assert_same(run(tmp_path / "ours.onnx", x=x)[0], run(tmp_path / "theirs.onnx", x=x)[0])


def test_a_model_keeps_its_own_data_until_it_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a second export over the first is interrupted at any point, the model on disk still has its own weights beside it."""
    model = trained("mlp", extra_outputs=True)
    x, _ = batch("mlp")
    monkeypatch.setattr(inference, "INLINE_LIMIT", 0)
    model.export_inference(tmp_path / "model.onnx")
    old = run(tmp_path / "model.onnx", x=x)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    for number in range(1, 100):
        hit: list[str] = []
        message = ""
        try:
            with failing(number, errno.ENOSPC, hit):
                model.export_inference(tmp_path / "model.onnx", overwrite=True)
        except toc.CheckpointError as error:
            message = str(error)
        found = run(tmp_path / "model.onnx", x=x)[0]
        assert (found == old).all() == ("untouched" in message), (hit, message)
        if "untouched" not in message:
            break  # the new one is in place
    assert number > 8
    assert len(os.listdir(tmp_path)) == 2
