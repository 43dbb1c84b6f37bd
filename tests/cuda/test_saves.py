"""Checkpoints of a training on CUDA, under the model: copies while training goes on, and restoring on another GPU."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_ort_ckpt as toc
from tests.cuda_model.interface import Cuda
from tests.models import batch, exported
from torch_ort_ckpt.cuda import devices
from torch_ort_ckpt.cuda.staging import Staging
from torch_ort_ckpt.training import distributed, manager


def native(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def exported_one(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = toc.OrtModule(exported("mlp"), device=device, engine="ort")
    return model, toc.OrtOptimizer(model, lr=0.01)


MAKERS = [pytest.param(native, id="native"), pytest.param(exported_one, id="ort", marks=pytest.mark.ort)]


def forward(model: nn.Module, device: str, seed: int = 0) -> torch.Tensor:
    x, y = (value.to(device) for value in batch("mlp", seed=seed))
    return model(x, y) if isinstance(model, toc.OrtModule) else nn.functional.cross_entropy(model(x), y)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, device: str = "cuda", seed: int = 0) -> None:
    forward(model, device, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


class Held:
    """Holds the writing thread back until the test lets it go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        write = manager.CheckpointManager._write

        def later(*arguments: Any) -> Any:
            assert self.go.wait(10)
            return write(*arguments)

        monkeypatch.setattr(manager.CheckpointManager, "_write", later)


@pytest.fixture
def ort_on_cuda(request: pytest.FixtureRequest, cuda: Cuda) -> None:
    """ONNX Runtime's part of the model, for the tests that need it."""
    if request.node.get_closest_marker("ort"):
        request.getfixturevalue("sessions")


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.usefixtures("ort_on_cuda")
def test_a_save_on_a_side_stream_holds_its_moment(cuda: Cuda, make: Any, tmp_path: Path) -> None:
    model, optimizer = make("cuda")
    step(model, optimizer)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with toc.CheckpointManager(tmp_path, async_save=True, durable=False) as saves, torch.cuda.stream(side):
        for seed in (1, 2):
            step(model, optimizer, seed=seed)
        saves.save(2, model, optimizer)  # after work that nothing has waited for
        step(model, optimizer, seed=3)
        saves.wait()
    reference, its = make("cpu")
    for seed in range(3):
        step(reference, its, "cpu", seed)
    assert_saved(tmp_path, make, values(reference))


def assert_saved(folder: Path, make: Any, expected: dict[str, torch.Tensor]) -> None:
    """The entry's values are those, and not what pinned memory holds before the copy has arrived."""
    model, optimizer = make("cpu")
    with toc.CheckpointManager(folder) as saves:
        saves.restore(model, optimizer)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.usefixtures("ort_on_cuda")
def test_a_save_neither_waits_nor_takes_device_memory(cuda: Cuda, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    model, optimizer = make("cuda")
    step(model, optimizer)
    expected = values(model)
    with toc.CheckpointManager(tmp_path, async_save=True, durable=False) as saves:
        used = torch.cuda.memory_allocated()
        with cuda.no_waits():
            saves.save(1, model, optimizer)
        assert torch.cuda.memory_allocated() == used
        step(model, optimizer, seed=1)
        held.go.set()
        saves.wait()
    assert_saved(tmp_path, make, expected)


@pytest.mark.parametrize("side", [False, True])
def test_the_writer_waits_for_its_own_copies(cuda: Cuda, side: bool, tmp_path: Path) -> None:
    """Nothing else waits: training ends with the save."""
    model, optimizer = native("cuda")
    step(model, optimizer)
    expected = values(model)
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with toc.CheckpointManager(tmp_path, async_save=True, durable=False) as saves, torch.cuda.stream(stream):
        saves.save(1, model, optimizer)
        saves.wait()
    assert_saved(tmp_path, native, expected)


def test_tied_tensors_are_copied_once(cuda: Cuda) -> None:
    value, staging = torch.ones(3, device="cuda"), Staging()
    copies = [staging.copy(value), staging.copy(value)]
    staging.finish().wait()
    assert copies[0] is copies[1]
    assert copies[0].is_pinned()
    assert copies[0].tolist() == [1.0] * 3


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.usefixtures("ort_on_cuda")
def test_an_entry_restores_on_another_gpu(cuda: Cuda, make: Any, tmp_path: Path) -> None:
    """Weights, moments and the gradients of an open window are where the model is now."""
    model, optimizer = make("cuda:0")
    step(model, optimizer, "cuda:0")
    forward(model, "cuda:0", 1).backward()
    with toc.CheckpointManager(tmp_path, durable=False) as saves:
        saves.save(1, model, optimizer, gradients=True)
        other, its = make("cuda:1")
        saves.restore(other, its)
    for name, value in other.named_parameters():
        source = model.get_parameter(name)
        assert value.grad is not None
        assert value.device == value.grad.device == torch.device("cuda", 1)
        torch.testing.assert_close(value.grad.cpu(), source.grad.cpu())
    for one, two in ((model, optimizer), (other, its)):
        two.step()
        two.zero_grad()
        step(one, two, "cuda:0" if one is model else "cuda:1", 2)
    for states in its.state.values():
        assert {key: value.device.index for key, value in states.items() if key != "step"} == {"exp_avg": 1, "exp_avg_sq": 1}
    for name, value in values(other).items():
        torch.testing.assert_close(value, values(model)[name])
    assert torch.cuda.current_device() == 0


def test_random_numbers_continue_on_another_gpu(cuda: Cuda, tmp_path: Path) -> None:
    """The generator that continues is that of the model's device; which index a job gets is chance."""
    cuda.seeds[0].fill_(10)
    cuda.seeds[1].fill_(11)
    with toc.CheckpointManager(tmp_path, durable=False) as saves:
        saves.save(1, *native("cuda:0"))
        for seed in cuda.seeds:
            seed.fill_(99)
        saves.restore(*native("cuda:1"))
        assert [int(seed[0]) for seed in cuda.seeds] == [10, 10]
        saves.restore(*native("cuda:0"))
        assert [int(seed[0]) for seed in cuda.seeds] == [10, 11]


def test_random_states_of_more_gpus_than_there_are(cuda: Cuda) -> None:
    states = [torch.full((16,), number, dtype=torch.uint8) for number in (30, 31, 32, 33)]
    devices.set_random_states(states, moved=(3, 1))
    assert [int(seed[0]) for seed in cuda.seeds] == [30, 33]


@pytest.mark.parametrize(("local_rank", "current"), [("1", 1), ("5", 0)])
def test_ranks_have_gloo_for_the_cpu_and_nccl_for_cuda(cuda: Cuda, monkeypatch: pytest.MonkeyPatch, local_rank: str, current: int) -> None:
    """A rank beyond the GPUs keeps its CPU model: more ranks than GPUs are not an error."""
    asked: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", asked.append)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", local_rank)):
        monkeypatch.setenv(name, value)
    assert distributed.start()
    assert asked == ["cpu:gloo,cuda:nccl"]
    assert torch.cuda.current_device() == current
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)  # a build with CUDA for Windows
    assert distributed.start()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert distributed.start()
    assert asked[1:] == ["gloo", "gloo"]
