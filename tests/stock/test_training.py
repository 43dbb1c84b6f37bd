"""`OrtModule` and `OrtOptimizer` on standard operators train as PyTorch does."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.models import batch, exported, module
from tests.stock.conftest import pretend

pytestmark = pytest.mark.ort_any

ADAMW = toc.OptimizerSpec("AdamW", eps=1e-3, weight_decay=0.01)
"""With a large eps: a gradient that is zero but for rounding (a bias before a norm) would otherwise move its parameter anywhere."""


def made(name: str, **options: Any) -> tuple[toc.OrtModule, toc.OrtOptimizer]:
    model = toc.OrtModule(exported(name, optimizer=ADAMW), engine="ort", threads=1, **options)
    return model, toc.OrtOptimizer(model, lr=0.01)


def step(model: toc.OrtModule, optimizer: toc.OrtOptimizer, values: Any) -> float:
    loss = model(*values)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


@pytest.mark.parametrize("dlpack", [True, False], ids=["dlpack", "addresses"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_losses_gradients_and_buffers_are_those_of_pytorch(name: str, dlpack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not dlpack:
        pretend(monkeypatch, trains=False, dlpack=False)
    model, optimizer = made(name)
    assert not optimizer.fused
    native = module(name)
    reference = torch.optim.AdamW(native.parameters(), lr=0.01, eps=1e-3, weight_decay=0.01)
    places = {key: value.data_ptr() for key, value in model.named_parameters()}
    for number in range(6):
        values = batch(name, seed=number, size=4 + number % 2)
        if number % 3 < 2:
            loss = model(*values)
            loss.backward()
        else:
            loss = model.train_step(*values)
        expected = F.cross_entropy(native(values[0]), values[1])
        expected.backward()
        assert abs(loss.item() - expected.item()) < 1e-5
        for key, value in native.named_parameters():
            torch.testing.assert_close(model.get_parameter(key).grad, value.grad, rtol=1e-4, atol=1e-4)
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
    assert {key: value.data_ptr() for key, value in model.named_parameters()} == places
    for key, value in native.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    model.eval()
    native.eval()
    assert abs(model(*values).item() - F.cross_entropy(native(values[0]), values[1]).item()) < 1e-5


def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = made("dropout", seed=3)
    for number in range(3):
        step(model, optimizer, batch("dropout", seed=number))
    toc.save(model.checkpoint(optimizer), tmp_path / "checkpoint")
    expected = [step(model, optimizer, batch("dropout", seed=number)) for number in range(3, 6)]
    again, other = made("dropout", seed=99)
    again.load_checkpoint(tmp_path / "checkpoint", other)
    assert [step(again, other, batch("dropout", seed=number)) for number in range(3, 6)] == expected
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)


def test_two_models_do_not_disturb_each_other_s_dropout() -> None:
    def losses(model: toc.OrtModule, between: Any = None) -> list[float]:
        found = []
        for number in range(4):
            found.append(model.train_step(*batch("dropout", seed=number)).item())
            if between is not None:
                between.train_step(*batch("dropout", seed=number))
        return found

    alone = losses(made("dropout", seed=1)[0])
    assert len(set(alone)) == 4
    assert losses(made("dropout", seed=1)[0], made("dropout", seed=2)[0]) == alone


def test_accumulation_and_scaling() -> None:
    model, _ = made("mlp")
    native = module("mlp")
    for number in range(3):
        x, y = batch("mlp", seed=number)
        (model(x, y) / 3).backward()
        (F.cross_entropy(native(x), y) / 3).backward()
    for key, value in native.named_parameters():
        torch.testing.assert_close(model.get_parameter(key).grad, value.grad, rtol=1e-5, atol=1e-6)


def test_memory_is_kept_without_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs live until the run, results after the next ones: no OrtValue does that there."""
    pretend(monkeypatch, trains=False, dlpack=False)
    model, _ = made("mlp")
    values = batch("mlp", size=64)
    expected = model(*values).item()
    results = []
    for _ in range(20):
        results.append(model(*(value.clone() for value in values)))
        gc.collect()
        torch.full((64, 12), float("nan"))
    assert {result.item() for result in results} == {expected}
    gradients = [gradient.clone() for gradient in torch.autograd.grad(results[0], list(model.parameters()))]
    torch.autograd.grad(results[1], list(model.parameters()))
    for one, other in zip(gradients, torch.autograd.grad(results[2], list(model.parameters())), strict=True):
        assert torch.equal(one, other)


def test_what_a_build_without_dlpack_can_not_share_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_ort_ckpt.engines.ort.dlpack import to_ort

    pretend(monkeypatch, trains=False, dlpack=False, version="1.20.1")
    with pytest.raises(toc.CheckpointError, match=r"onnxruntime 1\.20\.1 can't share bfloat16.*from 1\.21"):
        to_ort(torch.ones(2, dtype=torch.bfloat16))


def test_labels_out_of_range_are_named() -> None:
    model, _ = made("mlp")
    with pytest.raises(toc.CheckpointError, match="label 7 is out of range: there are 5 classes"):
        model(batch("mlp")[0], torch.full((4,), 7))


def test_the_weights_of_a_run_go_into_an_inference_model(tmp_path: Path) -> None:
    import onnxruntime

    model = toc.OrtModule(exported("mlp", extra_outputs=True), engine="ort")
    optimizer = toc.OrtOptimizer(model, lr=0.01)
    values = batch("mlp")
    for _ in range(2):
        model.train_step(*values)
        optimizer.step()
        optimizer.zero_grad()
    model.export_inference(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: values[0].numpy()})
    native = module("mlp")
    native.load_state_dict(model.state_dict())
    np.testing.assert_allclose(found, native(values[0]).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_training_session() -> None:
    session = toc.TrainingSession(exported("mlp", optimizer=ADAMW), engine="ort")
    session.set_learning_rate(0.01)
    model, optimizer = made("mlp")
    for number in range(3):
        values = batch("mlp", seed=number)
        loss = session.train_step(*values)
        session.optimizer_step()
        session.lazy_reset_grad()
        assert loss.item() == step(model, optimizer, values)
    with torch.no_grad():
        model.eval()
        assert session.eval_step(*values).item() == model(*values).item()


def test_a_runner_stops_and_goes_on(tmp_path: Path) -> None:
    data = [batch("mlp", seed=number) for number in range(4)]

    def run(folder: Path, steps: int) -> toc.OrtModule:
        model, optimizer = made("mlp")
        config = toc.RunnerConfig(steps, checkpoints_dir=folder, checkpoint_period=2, progress_bar=False)
        toc.TrainingRunner(model, optimizer, config).run(data)
        return model

    run(tmp_path / "parts", 4)
    found, expected = run(tmp_path / "parts", 8), run(tmp_path / "whole", 8)
    for key, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], value)
