"""`TrainingRunner`: the same numbers as a loop written by hand, resume to the bit, and everything it writes on the way."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.training.setups import ADAMW, Setup, assert_equal, data, data_for, graph, plain
from torch_ort_ckpt.training.runner import Event, StepMode

KINDS = [plain, pytest.param(graph, marks=pytest.mark.ort)]


def cross_entropy(model: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def runner(setup: Setup, num_train_steps: int = 20, **settings: Any) -> toc.TrainingRunner:
    extra = {name: settings.pop(name) for name in ("metric", "callbacks", "post_evaluation", "export") if name in settings}
    if isinstance(setup.model, nn.Sequential):
        extra.setdefault("loss", cross_entropy)
    if "lr" not in settings:
        extra["scheduler"] = setup.scheduler
    return toc.TrainingRunner(setup.model, setup.optimizer, toc.RunnerConfig(num_train_steps, **settings), **extra)


@pytest.mark.parametrize("make", KINDS)
def test_it_computes_what_a_loop_by_hand_computes(make: Callable[..., Setup]) -> None:
    a = make()
    loader = data_for(a)
    batches = (batch for _ in range(2) for batch in loader)
    for number, batch in enumerate(batches):
        (a.loss(batch) / 2).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(a.model.parameters(), 0.5)
            a.optimizer.step()
            a.optimizer.zero_grad()
            a.scheduler.step()
    b = make()
    result = runner(b, gradient_accumulation_steps=2, max_grad_norm=0.5).run(data_for(b))
    assert_equal(a.parameters(), b.parameters())
    assert (result.step, result.weight_updates, result.epoch) == (20, 10, 1)


@pytest.mark.parametrize("make", KINDS)
def test_a_preempted_run_goes_on_where_it_was_also_inside_a_window(make: Callable[..., Setup], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 4, "loss_scale": 256.0, "lr": toc.LearningRate(0.01, "cosine", 0.3)}
    whole = make()
    runner(whole, **settings).run(data_for(whole))

    def kill(event: Event) -> None:
        if event.kind == "step" and event.step in (6, 13):
            os.kill(os.getpid(), signal.SIGTERM)

    settings |= {"checkpoints_dir": tmp_path, "checkpoint_period": 2, "max_num_checkpoints": 2}
    ends = []
    for attempt in range(3):
        part = make(attempt)
        result = runner(part, **settings, callbacks=[kill]).run(data_for(part))
        ends.append((result.resumed_from, result.step, result.preempted))
    assert ends == [(None, 6, True), (6, 13, True), (13, 20, False)]
    assert_equal(whole.parameters(), part.parameters())


def test_evaluation_metrics_callbacks_and_the_best(tmp_path: Path) -> None:
    setup, seen, events = plain(), [], []

    def accuracy(outputs: Any, batch: Any) -> dict[str, float]:
        return {"accuracy": float((outputs[1].argmax(1) == batch[1]).float().mean())}

    def loss(model: nn.Module, batch: Any) -> Any:
        outputs = model(batch[0])
        return nn.functional.cross_entropy(outputs, batch[1]), outputs

    config = toc.RunnerConfig(
        30,
        evaluation_period=10,
        checkpoints_dir=tmp_path,
        checkpoint_period=10,
        max_num_checkpoints=1,
        keep_best="accuracy",
        keep_best_mode="max",
    )
    run = toc.TrainingRunner(
        setup.model,
        setup.optimizer,
        config,
        loss=loss,
        metric=accuracy,
        post_evaluation=lambda metrics, step: seen.append((step, metrics)),
        callbacks=[events.append],
    )
    test = data(count=18, shuffle=False)
    result = run.run(data(), test)
    assert [step for step, _ in seen] == [10, 20, 30]
    setup.model.eval()
    x, y = test.dataset.tensors  # type: ignore[attr-defined]
    with torch.no_grad():
        outputs = setup.model(x)
    assert result.metrics["loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, y)), rel=1e-5)
    assert result.metrics["accuracy"] == pytest.approx(float((outputs.argmax(1) == y).float().mean()))
    best = toc.CheckpointManager(tmp_path, keep_best="accuracy", mode="max").best()
    assert best is not None
    assert best.metrics["accuracy"] == max(metrics["accuracy"] for _, metrics in seen)
    modes = [event.mode for event in events if event.kind == "step"]
    assert set(modes) == {StepMode.MODEL_UPDATE}
    assert [event.mode.value for event in events if event.kind == "evaluation"] == ["EvaluateStep"] * 3
    assert [event.path.name for event in events if event.kind == "checkpoint"] == ["checkpoint_10", "checkpoint_20", "checkpoint_30"]


def test_the_step_modes_follow_the_window() -> None:
    modes = []
    runner(plain(), 6, gradient_accumulation_steps=3, callbacks=[lambda event: modes.append(event.mode.value)]).run(data())
    assert modes == ["GradientAccumulateStep", "GradientAccumulateStep", "ModelUpdateStep"] * 2


@pytest.mark.parametrize("scale", [2.0**100, "dynamic"])
def test_an_update_that_overflows_is_skipped(scale: Any) -> None:
    setup = plain()
    with torch.no_grad():
        for parameter in setup.model.parameters():
            parameter *= 1e10
    before = {name: value.detach().clone() for name, value in setup.model.named_parameters()}
    run = runner(setup, 4, loss_scale=scale)
    if scale == "dynamic":
        run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    result = run.run(data())
    assert (result.step, result.skipped_updates, result.weight_updates) == (4, 4, 0)
    assert run.scaler.get_scale() == (2.0**96 if scale == "dynamic" else 2.0**100)
    assert setup.scheduler.last_epoch == 0
    assert_equal(before, {name: value.detach() for name, value in setup.model.named_parameters()})


def test_scaling_by_a_power_of_two_changes_no_bit() -> None:
    a = plain()
    runner(a).run(data())
    b = plain()
    runner(b, loss_scale=1024.0).run(data())
    assert_equal(a.parameters(), b.parameters())


@pytest.mark.ort
def test_it_starts_from_any_checkpoint_and_exports_at_the_end(tmp_path: Path) -> None:
    import onnxruntime

    setup = graph()
    start = toc.OrtModule(toc.Artifacts.load(ADAMW, checkpoint=ADAMW / "initial_checkpoint"), threads=1)
    run = runner(
        setup, 4, checkpoint_to_load_path=ADAMW / "initial_checkpoint", mapped_dimensions={setup.model.artifacts.dimensions[0]: 4},
        perf_output_dir=tmp_path / "perf", export_path=tmp_path / "model.onnx", export_outputs=("logits",), checkpoints_dir=tmp_path / "c",
    )  # fmt: skip
    before = {}
    run._callbacks.append(lambda event: before.setdefault("first", setup.parameters()))
    with pytest.warns(toc.CheckpointWarning, match="no optimizer state"):  # the optimizer has the moments of the artifacts' checkpoint
        result = run.run(data_for(setup))
    assert result.weight_updates == 4
    assert before["first"].keys() == start.state_dict().keys()
    report = json.loads((tmp_path / "perf" / "perf_metrics.json").read_text())
    assert (report["NumOfBatches"], report["WeightUpdates"]) == (4, 4)
    assert report["Throughput"] == pytest.approx(16 / report["TotalTime"])
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    x = next(iter(data_for(setup)))[0]
    (scores, *_) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert np.isfinite(scores).all()
    # An entry is a start as well, with everything in it.
    again = graph(4)
    run = runner(again, 4, checkpoint_to_load_path=tmp_path / "c" / "checkpoint_4")
    assert run.run(data_for(again)).resumed_from == 4
    assert_equal(setup.parameters(), again.parameters())


def test_a_torch_checkpoint_is_a_start_too(tmp_path: Path) -> None:
    a, b = plain(), plain(5)
    runner(a, 5).run(data())
    toc.save(toc.from_torch(a.model, a.optimizer), tmp_path / "m.safetensors", format="safetensors")
    run = runner(b, 1, checkpoint_to_load_path=tmp_path / "m.safetensors")
    run._start_from(None)
    assert_equal(a.parameters(), b.parameters())
    assert int(next(iter(b.optimizer.state.values()))["step"]) == 5


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_has_scalars_histograms_and_norms(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    runner(plain(), 20, log_dir=tmp_path, display_loss_steps=5, histogram_period=10, max_grad_norm=1.0, evaluation_period=20).run(
        data(), data()
    )
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = events.Tags()["scalars"]
    assert {"loss", "lr", "throughput", "gradient_norm", "evaluation/loss", "norms/0.weight"} <= set(scalars)
    assert "weights/0.weight" in events.Tags()["histograms"]
    assert [event.step for event in events.Scalars("loss")] == [5, 10, 15, 20]


def test_a_failing_loader_worker_raises_here() -> None:
    class Broken(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            raise ValueError(f"sample {index} is unreadable")

    loader = torch.utils.data.DataLoader(Broken(), num_workers=1, batch_size=2)
    with pytest.raises(ValueError, match="sample 0 is unreadable"):
        runner(plain(), 4).run(loader)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_train_steps": 0}, "num_train_steps"),
        ({"num_train_steps": 10, "gradient_accumulation_steps": 3}, "not a multiple"),
        ({"num_train_steps": 4, "checkpoint_period": 2}, "checkpoints_dir"),
        ({"num_train_steps": 4, "loss_scale": "often"}, "loss_scale"),
        ({"num_train_steps": 4, "loss_scale": -1.0}, "loss_scale"),
        ({"num_train_steps": 4, "max_grad_norm": 0.0}, "max_grad_norm"),
        ({"num_train_steps": 4, "mapped_dimensions": {"batch": 0}}, "batch"),
        ({"num_train_steps": 4, "on_save_error": "shrug"}, "on_save_error"),
        ({"num_train_steps": 4, "lr": {"initial": 0.1, "mode": "wavy"}}, "lr.mode"),
        ({"num_train_steps": 4, "speed": 11}, "speed"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(toc.CheckpointError, match=message):
        toc.RunnerConfig.from_dict(settings)


def test_a_config_survives_a_file() -> None:
    config = toc.RunnerConfig(8, lr=toc.LearningRate(0.1, "poly", 0.2), checkpoints_dir=Path("a"), export_outputs=("x",))
    assert toc.RunnerConfig.from_dict(json.loads(json.dumps(config.to_dict()))).to_dict() == config.to_dict()


def test_the_bar_shows_loss_rate_and_throughput(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    result = runner(plain(), 20, display_loss_steps=20).run(data())
    shown = capsys.readouterr().err
    assert f"loss {result.loss:.4g}" in shown
    assert "samples/s" in shown
    assert "20/20" in shown
