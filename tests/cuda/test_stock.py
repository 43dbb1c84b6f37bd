"""Stock builds on CUDA tensors, under the model of CUDA: the lowered training graph and the update in standard operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.cuda.test_streams import assert_same_training, inputs, train
from tests.cuda_model.interface import Cuda
from tests.models import exported
from tests.stock.conftest import pretend
from torch_ort_ckpt.cuda import provider
from torch_ort_ckpt.engines.ort.build import Build

pytestmark = pytest.mark.ort


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> Build:
    return pretend(monkeypatch, trains=False)


@pytest.mark.parametrize("name", ["mlp", "transformer", "tied", "layernorm"])
def test_training_is_ordered_and_in_place(cuda: Cuda, sessions: list[Any], name: str) -> None:
    model = toc.OrtModule(exported(name), device="cuda", engine="ort")
    optimizer = toc.OrtOptimizer(model, lr=0.01)
    assert not optimizer.fused
    before = {key: value.data_ptr() for key, value in model.named_parameters()}
    losses = train(model, optimizer, name)
    assert {key: value.data_ptr() for key, value in model.named_parameters()} == before
    assert_same_training(name, model, losses)
    assert len({session.stream for session in sessions}) == 2  # the module's and the optimizer's


def test_an_update_does_not_wait(cuda: Cuda, sessions: list[Any]) -> None:
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort")
    optimizer = toc.OrtOptimizer(model, lr=0.01)
    model(*inputs("mlp")).backward()
    optimizer.step()
    with cuda.no_waits():
        for _ in range(3):
            optimizer.step()
    assert optimizer.updated


def test_a_build_without_dlpack_is_named(cuda: Cuda, sessions: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, trains=False, dlpack=False, version="1.20.1")
    with pytest.raises(toc.CheckpointError, match=r"onnxruntime 1\.20\.1 can't share CUDA tensors.*from 1\.21 on"):
        toc.OrtModule(exported("mlp"), device="cuda", engine="ort")


@pytest.mark.parametrize("here", [True, False])
def test_libraries_are_loaded_where_the_package_can(here: bool) -> None:
    loaded = []

    class New:
        def preload_dlls(self) -> None:
            loaded.append(True)

    provider.load_libraries(New() if here else torch)
    assert bool(loaded) == here
