"""Rules of ONNX Runtime and of PyTorch's kernels that lose numbers or wait in silence, under the model of CUDA."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime")

import torch_ort_ckpt as toc
from tests.cuda.test_streams import inputs, train
from tests.cuda_model import provider as ort_model
from tests.cuda_model.interface import Cuda
from tests.models import batch, exported
from torch_ort_ckpt.cli import main
from torch_ort_ckpt.cuda import kernels, provider

pytestmark = pytest.mark.ort


def test_a_parameter_that_the_cpu_reads_too_is_never_stale(read_by_the_cpu: toc.Artifacts, cuda: Cuda, sessions: list[Any]) -> None:
    model = toc.OrtModule(read_by_the_cpu, device="cuda", engine="ort")
    reference = toc.OrtModule(read_by_the_cpu, engine="ort")
    for seed in range(3):
        found, expected = model(*inputs("mlp", seed)), reference(*inputs("mlp", seed, "cpu"))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other)
        with torch.no_grad():
            for value in (*model.parameters(), *reference.parameters()):
                value.add_(0.1)
    assert sessions[0].planned_inputs["fc1.bias"] == ort_model.CPU


def test_a_norm_that_is_used_twice_counts_both(norm_used_twice: toc.Artifacts, cuda: Cuda, sessions: list[Any]) -> None:
    for engine in ("ort", "torch"):
        model = toc.OrtModule(norm_used_twice, device="cuda", engine=engine)
        for _ in range(3):
            model(*inputs("mlp"))
        assert model.state_dict()["norm.num_batches_tracked"].item() == 6


def test_both_gradients_of_a_tied_parameter_are_added(layernorm: toc.Artifacts, cuda: Cuda, sessions: list[Any]) -> None:
    found = []
    for device in ("cuda", "cpu"):
        model = toc.OrtModule(layernorm, device=device, engine="ort")
        model.fc2._parameters["bias"] = model.fc2.bias
        model.norm._parameters["bias"] = model.norm.weight  # one parameter in two places of the graph
        for seed in range(3):
            model.train_step(*inputs("layernorm", seed, device))
        assert model.norm.weight.grad is not None
        found.append(model.norm.weight.grad.cpu())
    torch.testing.assert_close(found[0], found[1])


def test_models_in_ort_s_own_format_do_not_wait(ort_format: Path, cuda: Cuda, sessions: list[Any]) -> None:
    model, reference = toc.OrtModule(ort_format, device="cuda", engine="ort"), toc.OrtModule(exported("mlp"), engine="ort")
    optimizers = [toc.OrtOptimizer(m, lr=0.01) for m in (model, reference)]
    found, expected = (train(m, optimizer, "mlp") for m, optimizer in zip((model, reference), optimizers, strict=True))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other)
    given = inputs("mlp")
    with cuda.no_waits():
        model(*given).backward()
        optimizers[0].step()


@pytest.mark.parametrize("by_ort", ["cnn"], indirect=True)
def test_nodes_that_run_on_the_cpu_are_named(
    by_ort: toc.Artifacts, cuda: Cuda, sessions: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = toc.OrtModule(by_ort, device="cuda", engine="ort")
        model(*inputs("cnn"))
    assert "MaxPoolGrad" in caplog.text
    assert any("MaxPoolGrad" in wait for wait in cuda.waits)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        toc.OrtModule(exported("mlp"), device="cuda", engine="ort")(*inputs("mlp"))
    assert caplog.text == ""


BY_ORT = [("mlp", "ort"), ("cnn", "torch"), ("lstm", "torch"), ("transformer", "ort")]


@pytest.mark.parametrize(("by_ort", "engine"), BY_ORT, indirect=["by_ort"])
def test_auto_prefers_the_engine_that_does_not_wait(by_ort: toc.Artifacts, cuda: Cuda, sessions: list[Any], engine: str) -> None:
    assert toc.OrtModule(by_ort, device="cuda").engine.name == engine
    assert toc.OrtModule(by_ort).engine.name == "ort"


def test_artifacts_say_what_runs_on_cuda() -> None:
    assert exported("cnn", builder="ort").on_cuda() == "all but MaxPoolGrad"
    assert exported("cnn").on_cuda() == "all"  # PyTorch's gradients have standard operators only
    assert exported("mlp", builder="ort").on_cuda() == "all"
    assert "runs on CUDA (engine ort): all but LSTMTraining, LSTMGrad" in exported("lstm", builder="ort").describe()


def test_inspect_says_what_runs_on_cuda(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(exported("cnn", builder="ort").folder, tmp_path / "artifacts")
    assert main(["inspect", str(folder)]) == 0
    assert "runs on CUDA (engine ort): all but MaxPoolGrad\n" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["artifacts"]["on_cuda"] == "all but MaxPoolGrad"


def test_the_table_of_kernels() -> None:
    assert kernels.fallbacks([("", "Conv"), ("ai.onnx", "MaxPoolGrad"), ("", "MaxPoolGrad"), ("com.microsoft", "LSTMGrad")]) == [
        "MaxPoolGrad",
        "LSTMGrad",
    ]
    assert kernels.fallbacks([("", "ArgMax")]) == ["ArgMax"]  # its CUDA kernel ends at opset 11
    assert kernels.fallbacks([("com.microsoft", "BroadcastGradientArgs"), ("com.microsoft", "ConvGrad"), ("", "GatherND")]) == []


def test_tf32_follows_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        allow_tf32 = False

    matmul, cudnn = Backend(), Backend()
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    device = torch.device("cuda", 0)
    for in_products, in_convolutions, expected in ((False, True, "0"), (True, True, "1"), (True, False, "0")):
        matmul.allow_tf32, cudnn.allow_tf32 = in_products, in_convolutions
        assert provider.provider_options(device, 5, {})["use_tf32"] == expected
    assert provider.provider_options(device, 5, {"use_tf32": "0"})["use_tf32"] == "0"


def test_tf32_set_by_the_newer_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        fp32_precision = "tf32"

        @property
        def allow_tf32(self) -> bool:
            raise RuntimeError("set by the newer name")

    monkeypatch.setattr(torch.backends.cuda, "matmul", Backend())
    monkeypatch.setattr(torch.backends, "cudnn", Backend())
    assert provider.allows_tf32()


def test_the_arena_grows_by_what_is_asked_for(cuda: Cuda, sessions: list[Any]) -> None:
    model = toc.OrtModule(exported("mlp"), device="cuda:1", engine="ort")
    model(*inputs("mlp", device="cuda:1"))
    options = sessions[0].options
    assert options["arena_extend_strategy"] == "kSameAsRequested"
    assert options["device_id"] == "1"
    assert int(options["user_compute_stream"]) != 0


def test_moving_the_model_to_another_gpu(cuda: Cuda, sessions: list[Any]) -> None:
    model = toc.OrtModule(exported("mlp"), device="cuda:0", engine="ort")
    expected = model(*inputs("mlp")).cpu()
    model.to("cuda:1")
    assert model.device == torch.device("cuda", 1)
    torch.testing.assert_close(model(*inputs("mlp", device="cuda:1")).cpu(), expected)
    with pytest.raises(toc.CheckpointError, match="is on cpu, the model on cuda:1"):
        model(*batch("mlp"))
