"""The optimizer graph on tensors in device memory, under the model of CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.cuda.test_streams import assert_same_training, inputs, train
from tests.cuda_model.interface import Cuda
from tests.models import exported
from torch_ort_ckpt.engines.ort import graph_updates
from torch_ort_ckpt.engines.ort.roles import Roles

pytestmark = pytest.mark.ort


@pytest.mark.parametrize("name", ["mlp", "transformer", "tied", "layernorm"])
def test_the_graph_updates_the_tensors_in_place(cuda: Cuda, sessions: list[Any], name: str) -> None:
    model = toc.OrtModule(exported(name), device="cuda", engine="ort")
    optimizer = toc.OrtOptimizer(model, lr=0.01)
    assert not optimizer.fused
    before = {key: value.data_ptr() for key, value in model.named_parameters()}
    losses = train(model, optimizer, name)
    assert {key: value.data_ptr() for key, value in model.named_parameters()} == before
    assert all(value.is_cuda for state in optimizer.state.values() for key, value in state.items() if key != "step")
    assert_same_training(name, model, losses)


def test_a_graph_that_clips(clipping: toc.Artifacts, cuda: Cuda, sessions: list[Any]) -> None:
    model, reference = (toc.OrtModule(clipping, device=device, engine="ort") for device in ("cuda", "cpu"))
    found, expected = (train(m, toc.OrtOptimizer(m, lr=0.01), "mlp") for m in (model, reference))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_an_update_does_not_wait_or_copy(cuda: Cuda, sessions: list[Any]) -> None:
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort")
    optimizer = toc.OrtOptimizer(model, lr=0.01)
    model(*inputs("mlp")).backward()
    optimizer.step()
    cuda.kernels.seen.clear()
    with cuda.no_waits():
        for _ in range(3):
            optimizer.step()
    assert optimizer.updated
    assert cuda.kernels.seen == {}, "PyTorch's kernels have nothing to do in an update"


def test_other_hyper_parameters_use_another_session_on_the_same_stream(cuda: Cuda, sessions: list[Any]) -> None:
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort")
    optimizer = toc.OrtOptimizer(model, lr=0.01)
    model(*inputs("mlp")).backward()
    optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0.3
    optimizer.step()
    updating = [session for session in sessions if "learning_rate" in session.planned_inputs]
    assert len({session.stream for session in updating}) == 1
    assert len(updating) == 2


def test_tensors_on_another_gpu_are_refused(cuda: Cuda, sessions: list[Any]) -> None:
    model = toc.OrtModule(exported("mlp"), device="cuda:0", engine="ort")
    optimizer = toc.OrtOptimizer(model, lr=0.01)
    model(*inputs("mlp")).backward()
    optimizer.step()
    for parameter in model.parameters():
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.to("cuda:1")
        parameter.grad = gradient.to("cuda:1") if gradient is not None else None
    with pytest.raises(toc.CheckpointError, match="on cuda:1, the optimizer graph on cuda:0"):
        optimizer.step()


def test_an_empty_parameter_is_left_out(cuda: Cuda, sessions: list[Any]) -> None:
    made: list[int] = []
    run = Roles(["params"], lambda own: made.append(len(own)), torch.device("cuda", 0))
    values = [torch.zeros(size, device="cuda") for size in (3, 0, 5)]
    update = graph_updates.Update(values, values, values, values, 1, 0.1, exported("mlp").optimizer_spec)
    run.of(run.addresses(update), update)
    assert set(made) == {2}


def test_without_sequences_the_default_is_pytorch_s_kernels(cuda: Cuda, sessions: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_updates, "available", lambda: False)
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort")
    assert toc.OrtOptimizer(model).fused
    optimizer = toc.OrtOptimizer(model, fused=False)
    model(*inputs("mlp")).backward()
    with pytest.raises(toc.CheckpointError, match=r"1\.19\.2 on Linux.*fused=True"):
        optimizer.step()
