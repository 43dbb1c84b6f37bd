"""Devices: options and errors. On the real thing: `test_check`."""

from __future__ import annotations

import pytest
import torch

import torch_ort_ckpt as toc
from tests.models import batch, exported
from torch_ort_ckpt.cuda import devices, provider
from torch_ort_ckpt.engines import EngineOptions, make
from torch_ort_ckpt.engines.ort.graph_updates import GraphUpdater

pytestmark = pytest.mark.ort


def test_the_provider_gets_the_device_and_the_stream() -> None:
    options = provider.provider_options(torch.device("cuda", 1), 12345, {"cudnn_conv_algo_search": "EXHAUSTIVE"})
    assert options["device_id"] == "1"
    assert options["user_compute_stream"] == "12345"
    assert options["arena_extend_strategy"] == "kSameAsRequested"
    assert options["cudnn_conv_algo_search"] == "EXHAUSTIVE"


@pytest.mark.parametrize("name", ["user_compute_stream", "device_id", "gpu_external_alloc", "enable_cuda_graph"])
def test_options_that_would_break_the_order_are_refused(name: str) -> None:
    with pytest.raises(toc.CheckpointError, match=f"{name}.*can't be chosen"):
        provider.provider_options(torch.device("cuda", 1), 12345, {name: "0"})


def test_a_session_that_fell_back_to_the_cpu_is_an_error() -> None:
    with pytest.raises(toc.CheckpointError, match=r"could not load its CUDA provider.*doctor"):
        provider.loaded(["CPUExecutionProvider"])
    provider.loaded(["CUDAExecutionProvider", "CPUExecutionProvider"])


def test_a_missing_gpu_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(toc.CheckpointError, match=r'PyTorch finds no CUDA device.*device="cpu"'):
        toc.OrtModule(exported("mlp"), device="cuda")


def test_a_build_of_onnxruntime_without_cuda_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(toc.CheckpointError, match=r"no CUDA provider.*torch-ort-ckpt\[cuda\]"):
        devices.check(torch.device("cuda"), ["CPUExecutionProvider"])


def test_other_devices_are_refused() -> None:
    with pytest.raises(toc.CheckpointError, match="cpu and cuda, not on mps"):
        make("ort", exported("mlp"), EngineOptions(device=torch.device("mps")))
    with pytest.raises(toc.CheckpointError, match="is on meta, the model on cpu"):
        toc.OrtModule(exported("mlp"))(torch.zeros(4, 12, device="meta"), batch("mlp")[1])
    with pytest.raises(toc.CheckpointError, match="no engine called 'tpu'"):
        toc.OrtModule(exported("mlp"), engine="tpu")


def test_the_optimizer_graph_is_for_the_cpu_and_cuda() -> None:
    with pytest.raises(toc.CheckpointError, match=r"does not run on mps.*fused=True"):
        GraphUpdater(exported("mlp"), EngineOptions(device=torch.device("mps", 0)))
