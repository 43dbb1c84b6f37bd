"""`torch-ort-ckpt doctor --cuda`: without a GPU, on the model of CUDA, and (marked `cuda`) on the real thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda_model.interface import Cuda
from torch_ort_ckpt.cli import cuda_check, cuda_subjects, main
from torch_ort_ckpt.cli.cuda_subjects import Subject
from torch_ort_ckpt.cli.doctor import ABSENT, PROBLEM, WORKS
from torch_ort_ckpt.cuda import streams
from torch_ort_ckpt.errors import CheckpointError

WAYS = [("ort", False), ("ort", True), ("torch", True)]
FIRST = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Subject]:
    return cuda_subjects.subjects(tmp_path_factory.mktemp("subjects"), exporter="torchscript")


@pytest.fixture(scope="module")
def half(found: list[Subject], tmp_path_factory: pytest.TempPathFactory) -> list[Subject]:
    folder = tmp_path_factory.mktemp("half")
    return [cuda_subjects.with_half_weights(found[0], dtype, folder / str(dtype)) for dtype in (torch.float16, torch.bfloat16)]


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments in (["doctor", "--cuda"], ["doctor", "--cuda", "--json"]):
        assert main(arguments) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert len(output.err.splitlines()) == 1
        assert "no GPU" in output.err


@pytest.mark.ort
def test_every_row_works_on_the_model(
    found: list[Subject], half: list[Subject], cuda: Cuda, sessions: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_check, "speed", lambda *_: "not measured on a model")
    rows = list(cuda_check.rows(found, half, FIRST, tmp_path, steps=10))
    assert [(row.name, row.detail) for row in rows if row.status != WORKS] == []
    assert sum("equals the CPU" in row.name for row in rows) == 3 * 5 + 2 * 2
    for what in ("does not wait", "memory is flat", "asynchronous save", "speed"):
        assert sum(what in row.name for row in rows) == 3
    for what in ("two streams", "two GPUs"):
        assert sum(what in row.name for row in rows) == 2


@pytest.mark.ort
def test_speed_counts_steps_of_both(found: list[Subject], cuda: Cuda, sessions: list[Any]) -> None:
    assert "us a step, PyTorch" in cuda_check.speed(found[0], FIRST, "ort", False, steps=1)


@pytest.mark.ort
def test_the_command_prints_a_table_to_paste(
    found: list[Subject], cuda: Cuda, sessions: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_check, "speed", lambda *_: "not measured on a model")
    monkeypatch.setattr(cuda_check, "examine", lambda device: cuda_check.rows(found[:1], [], device, Path("unused"), steps=5))
    monkeypatch.setattr(cuda_check, "asynchronous_save", lambda *_: "left out here")
    assert main(["doctor", "--cuda"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("torch-ort-ckpt ")
    assert lines[2:4] == ["| check | status | detail |", "|---|---|---|"]
    assert any(line.startswith("| engine ort, graph optimizer: perceptron equals the CPU | works | 5 steps") for line in lines)
    assert lines[-1].endswith(cuda_check.SANITIZER)
    assert main(["doctor", "--cuda", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert {check["status"] for check in report["checks"]} == {WORKS}


@pytest.mark.ort
def test_without_onnxruntime_s_provider_the_torch_engine_is_checked(
    found: list[Subject], cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This build of ONNX Runtime is for the CPU."""
    monkeypatch.setattr(cuda_check, "speed", lambda *_: "not measured on a model")
    rows = list(cuda_check.rows(found[:1], [], FIRST, tmp_path, steps=3))
    assert (rows[0].status, rows[0].detail) == (ABSENT, "this build of onnxruntime has no CUDA provider")
    assert {row.status for row in rows[1:]} == {WORKS}
    assert all("engine torch" in row.name for row in rows[1:])


# each check notices what it is there for


@pytest.mark.ort
def test_a_wrong_gradient_is_noticed(found: list[Subject], cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cuda_check._made

    def with_a_fault(subject: Subject, device: torch.device, *way: Any) -> Any:
        model, optimizer = made(subject, device, *way)
        if device.type == "cuda":
            for value in model.parameters():
                value.register_hook(lambda gradient: gradient * 1.01)
        return model, optimizer

    monkeypatch.setattr(cuda_check, "_made", with_a_fault)
    with pytest.raises(CheckpointError, match=r"gradients differ by 1\.0e-02"):
        cuda_check.parity(found[0], FIRST, "torch", True)


@pytest.mark.ort
def test_a_wait_is_noticed(found: list[Subject], cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    step = cuda_check._step
    monkeypatch.setattr(cuda_check, "_step", lambda model, optimizer, given: (step(model, optimizer, given), given[0].sum().item()))
    row = cuda_check._row("waits", lambda: cuda_check.no_waits(found[0], FIRST, "torch", True))
    assert row.status == PROBLEM
    assert "synchronizing CUDA operation" in row.detail
    assert not cuda.machine.refuses_waits


@pytest.mark.ort
def test_growing_memory_is_noticed(found: list[Subject], cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    step, kept = cuda_check._step, []
    monkeypatch.setattr(cuda_check, "_step", lambda model, optimizer, given: (step(model, optimizer, given), kept.append(given[0] + 1)))
    with pytest.raises(CheckpointError, match="10 steps: PyTorch's memory went from"):
        cuda_check.flat_memory(found[0], FIRST, "torch", True, steps=10)


@pytest.mark.ort
def test_unordered_streams_are_noticed(found: list[Subject], cuda: Cuda, sessions: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the model the fault is a race; on hardware, wrong numbers."""
    monkeypatch.setattr(streams.Lane, "ordered", lambda lane: torch.cuda.stream(lane.stream))
    row = cuda_check._row("streams", lambda: cuda_check.two_streams(found[0], FIRST, "ort", rounds=2))
    assert row.status == PROBLEM


@pytest.mark.ort
def test_a_changed_device_is_noticed(found: list[Subject], cuda: Cuda, sessions: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    parity = cuda_check.parity

    def changing(*arguments: Any) -> str:
        shown = parity(*arguments)
        torch.cuda.set_device(1)
        return shown

    monkeypatch.setattr(cuda_check, "parity", changing)
    with pytest.raises(CheckpointError, match="changed from 0 to 1"):
        cuda_check.two_gpus(found[0], "ort")


# on a GPU


def usable(engine: str) -> str:
    if engine == "ort" and (reason := cuda_check.why_not(FIRST)) is not None:
        pytest.skip(reason)
    return engine


@pytest.mark.cuda
@pytest.mark.ort
@pytest.mark.parametrize(("engine", "fused"), WAYS)
def test_training_equals_the_cpu(found: list[Subject], half: list[Subject], engine: str, fused: bool) -> None:
    for subject in [*found, *(half if engine == "ort" else [])]:
        assert cuda_check.parity(subject, FIRST, usable(engine), fused)


@pytest.mark.cuda
@pytest.mark.ort
@pytest.mark.parametrize(("engine", "fused"), WAYS)
def test_steps_on_a_gpu(found: list[Subject], tmp_path: Path, engine: str, fused: bool) -> None:
    assert cuda_check.no_waits(found[0], FIRST, usable(engine), fused)
    assert cuda_check.flat_memory(found[0], FIRST, engine, fused)
    assert cuda_check.asynchronous_save(found[0], FIRST, engine, fused, tmp_path)


@pytest.mark.cuda
@pytest.mark.ort
@pytest.mark.parametrize("engine", ["ort", "torch"])
def test_streams_and_devices_on_a_gpu(found: list[Subject], engine: str) -> None:
    assert cuda_check.two_streams(found[0], FIRST, usable(engine))
    if torch.cuda.device_count() > 1:
        assert cuda_check.two_gpus(found[0], engine)
