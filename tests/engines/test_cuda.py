"""CUDA: what can be checked without a GPU (options, errors), and the real thing where there is one."""

from __future__ import annotations

import pytest
import torch

import torch_ort_ckpt as toc
from tests.models import batch, exported
from torch_ort_ckpt.engines import EngineOptions, make
from torch_ort_ckpt.engines.ort import cuda
from torch_ort_ckpt.engines.ort.graph_updates import GraphUpdater

pytestmark = pytest.mark.ort


def test_the_provider_gets_the_device_and_pytorch_s_stream() -> None:
    options = cuda.provider_options(torch.device("cuda", 1), 12345, {"arena_extend_strategy": "kSameAsRequested"})
    assert options["device_id"] == "1"
    assert options["user_compute_stream"] == "12345"
    assert options["arena_extend_strategy"] == "kSameAsRequested"


def test_a_session_that_fell_back_to_the_cpu_is_an_error() -> None:
    with pytest.raises(toc.CheckpointError, match=r"could not load its CUDA provider.*doctor"):
        cuda.loaded(["CPUExecutionProvider"])
    cuda.loaded(["CUDAExecutionProvider", "CPUExecutionProvider"])


def test_a_missing_gpu_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(toc.CheckpointError, match=r'PyTorch finds no CUDA device.*device="cpu"'):
        toc.OrtModule(exported("mlp"), device="cuda")


def test_a_build_of_onnxruntime_without_cuda_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(toc.CheckpointError, match=r"no CUDA provider.*torch-ort-ckpt\[cuda\]"):
        cuda.check(torch.device("cuda"), ["CPUExecutionProvider"])


def test_other_devices_are_refused() -> None:
    with pytest.raises(toc.CheckpointError, match="cpu and cuda, not on mps"):
        make("ort", exported("mlp"), EngineOptions(device=torch.device("mps")))
    with pytest.raises(toc.CheckpointError, match="is on meta, the model on cpu"):
        toc.OrtModule(exported("mlp"))(torch.zeros(4, 12, device="meta"), batch("mlp")[1])
    with pytest.raises(toc.CheckpointError, match="no engine called 'tpu'"):
        toc.OrtModule(exported("mlp"), engine="tpu")


def test_the_optimizer_graph_is_not_for_device_memory() -> None:
    with pytest.raises(toc.CheckpointError, match="fused=True"):
        GraphUpdater(exported("mlp"), EngineOptions(device=torch.device("cuda", 0)))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_training_on_cuda_equals_the_cpu(name: str) -> None:
    reference, model = toc.OrtModule(exported(name)), toc.OrtModule(exported(name), device="cuda")
    optimizers = [toc.OrtOptimizer(m, lr=0.01, fused=True) for m in (reference, model)]
    for seed in range(5):
        x, y = batch(name, seed=seed)
        losses = [reference(x, y), model(x.cuda(), y.cuda())]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-3)
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key].cpu(), value, rtol=1e-2, atol=1e-3)


@pytest.mark.cuda
def test_a_step_on_another_stream_does_not_wait_for_the_host() -> None:
    model = toc.OrtModule(exported("mlp"), device="cuda")
    x, y = (value.cuda() for value in batch("mlp"))
    expected = model(x, y).item()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda.set_sync_debug_mode("error")
        loss = model(x, y)
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert loss.item() == pytest.approx(expected)
