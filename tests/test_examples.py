"""Every example runs, and what it shows is true. (`plain_loop.py` has tests of its own.)"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType

import onnx
import pytest
import torch

import torch_ort_ckpt as toc

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    assert [path.name for path in sorted(EXAMPLES.glob("*.py")) if path.stem not in tests] == []


def test_convert_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("convert_checkpoint")
    model = module.main(tmp_path)
    assert "ort version 1" in capsys.readouterr().out
    expected = module.old_checkpoint(tmp_path / "again").state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])
    upgraded = toc.load(tmp_path / "upgraded")
    assert upgraded.format_version == 2
    assert upgraded.step == 1
    assert torch.equal(upgraded.trainable["0.weight"], expected["0.weight"])


def test_federated_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accuracies = example("federated_server").main(tmp_path)
    out = capsys.readouterr().out
    assert accuracies[-1] > accuracies[0] + 0.2
    assert "upload_2: left out" in out
    assert "round 1: 2 devices" in out
    assert toc.load(tmp_path / "global").optimizer == {}


@pytest.mark.ort
def test_transformer_finetune(tmp_path: Path) -> None:
    before, after = example("transformer_finetune").main(tmp_path)
    assert after < before / 2
    state = toc.load(tmp_path / "checkpoint")
    assert state.step == 150
    assert set(state.frozen) == {"words.weight"}
    onnx.checker.check_model(str(tmp_path / "inference.onnx"))


def test_notebook_tour(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    tour = example("notebook_tour")
    assert tour.losses[-1] < tour.losses[0]
    assert not tour.change.equal
    assert (tmp_path / "tour" / "change.html").stat().st_size > 10_000


@pytest.mark.ort
def test_phone_round_trip(tmp_path: Path) -> None:
    module = example("phone_round_trip")
    losses = module.main(tmp_path)
    assert toc.load(tmp_path / "final").step == 3 * module.STEPS
    # The same 60 steps in PyTorch alone.
    toc.save(toc.from_torch(module.network()), tmp_path / "start")
    expected = []
    for stage, (source, target) in enumerate((("start", "one"), ("one", "two"), ("two", "three"))):
        expected += module.in_pytorch(tmp_path, source, target, stage)
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.ort
def test_torch_engine_compile(tmp_path: Path) -> None:
    losses = example("torch_engine_compile").main(tmp_path, steps=10, compile=shutil.which("g++") is not None)
    for values in losses.values():
        assert values == pytest.approx(losses["ort"], rel=1e-4)
    assert "torch_ort_ckpt" not in (tmp_path / "model.py").read_text()


@pytest.mark.lightning
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_lightning_mnist_like(tmp_path: Path) -> None:
    step, state = example("lightning_mnist_like").main(tmp_path)
    assert step == 60  # 20 of them before the Trainer was replaced
    assert state.step in (20, 40, 60)  # the best epoch's
    assert set(state.trainable) == {"net.0.weight", "net.0.bias", "net.4.weight", "net.4.bias"}


def test_resume_after_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent), prepend=os.pathsep)
    ended, equal = example("resume_after_kill").main(tmp_path)
    assert ended == -9
    assert equal
    assert "killed: step 60, resumed from 30" in capsys.readouterr().out


@pytest.mark.ort
def test_ddp_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent), prepend=os.pathsep)
    out = example("ddp_torchrun").main(tmp_path)
    assert "2 ranks, step 40" in out
    assert "weights equal on all" in out
    assert toc.load(tmp_path / "run" / "checkpoint_40" / "checkpoint").step == 40


@pytest.mark.ort
def test_train_on_stock_onnxruntime(capsys: pytest.CaptureFixture[str]) -> None:
    losses, after = example("train_on_stock_onnxruntime").main(steps=20)
    assert losses[-1] < losses[0] / 2
    assert after < losses[0] / 2
    assert "PyTorch went on from there" in capsys.readouterr().out
