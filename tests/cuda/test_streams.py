"""The ort engine on the model of CUDA: its runs are ordered with PyTorch's work, on every stream and in every thread."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.cuda_model.interface import Cuda
from tests.models import batch, exported
from tests.runtime.test_mixed_precision import mixed
from torch_ort_ckpt.cuda import streams

pytestmark = pytest.mark.ort


def inputs(name: str, seed: int = 0, device: str = "cuda") -> list[torch.Tensor]:
    return [value.to(device) for value in batch(name, seed=seed)]


def train(model: Any, optimizer: Any, name: str, steps: int = 4) -> list[torch.Tensor]:
    losses = []
    for seed in range(steps):
        loss = model(*inputs(name, seed, str(model.device)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def assert_same_training(name: str, model: Any, losses: list[torch.Tensor], steps: int = 4, **options: Any) -> None:
    reference = toc.OrtModule(exported(name), engine="ort")
    expected = train(reference, toc.OrtOptimizer(reference, lr=0.01, **options), name, steps)
    for found, right in zip(losses, expected, strict=True):
        torch.testing.assert_close(found.cpu(), right.cpu(), rtol=1e-5, atol=1e-6)
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key].cpu(), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "transformer", "tied"])
def test_training_on_the_default_stream_is_ordered(cuda: Cuda, sessions: list[Any], name: str) -> None:
    model = toc.OrtModule(exported(name), device="cuda", engine="ort")
    losses = train(model, toc.OrtOptimizer(model, lr=0.01, fused=True), name)
    assert all(session.stream.handle != 0 for session in sessions)
    assert_same_training(name, model, losses, fused=True)


def test_training_on_a_side_stream_is_ordered(cuda: Cuda, sessions: list[Any]) -> None:
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort")
    optimizer = toc.OrtOptimizer(model, lr=0.01, fused=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        losses = train(model, optimizer, "mlp")
    torch.cuda.current_stream().wait_stream(side)
    assert_same_training("mlp", model, losses, fused=True)


def test_the_order_holds_when_a_run_fails(cuda: Cuda, sessions: list[Any]) -> None:
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort")
    x, y = inputs("mlp")
    model(x, y)
    sessions[0].failing = True
    with pytest.raises(toc.CheckpointError, match="out of memory"):
        model(x, y)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)  # must come after what the failed run has read
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("name", ["mlp", "transformer", "layernorm", "embedding", "dropout", "groupnorm"])
def test_a_step_does_not_wait(cuda: Cuda, sessions: list[Any], name: str) -> None:
    model = toc.OrtModule(exported(name), device="cuda", engine="ort")
    optimizer = toc.OrtOptimizer(model, lr=0.01)
    train(model, optimizer, name, 1)
    given = inputs(name)
    with cuda.no_waits():
        for _ in range(3):
            model(*given).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.train_step(*given)
            model.lazy_reset_grad()
        with torch.no_grad():
            model.eval()(*given)


def test_two_threads_on_two_streams(cuda: Cuda, sessions: list[Any]) -> None:
    """Each thread computes gradients and reads them on a stream of its own; the gradient buffers and outputs are used again by both."""
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort")
    given, made = inputs("mlp"), torch.cuda.Event()
    model(*given)
    made.record()
    problems: list[BaseException] = []
    turn = threading.Barrier(2)

    def work() -> None:
        try:
            stream = torch.cuda.Stream()
            stream.wait_event(made)
            with torch.cuda.stream(stream):
                for _ in range(6):
                    loss = model(*given)
                    found = torch.autograd.grad(loss, [value for value in model.parameters() if value.requires_grad])
                    total = sum(gradient.sum() for gradient in found) + loss
                    del found, loss
                    turn.wait()
                    del total
        except BaseException as error:  # handed to the test's own thread
            problems.append(error)
            turn.abort()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [problem for problem in problems if not isinstance(problem, threading.BrokenBarrierError)]


def test_two_threads_do_not_run_at_once(cuda: Cuda, sessions: list[Any]) -> None:
    """All threads share the cuDNN handle of a session."""
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort")
    given = inputs("mlp")
    with torch.no_grad():
        model.eval()(*given)
    torch.cuda.synchronize()
    meeting = threading.Barrier(2)
    problems: list[BaseException] = []

    def meet() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # nobody came, as it should be
            meeting.wait(0.2)

    def work() -> None:
        try:
            with torch.no_grad():
                model(*given)
        except BaseException as error:  # handed to the test's own thread
            problems.append(error)
            meet()

    sessions[0].during = meet

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_memory_dropped_during_a_run_is_not_used_by_it(cuda: Cuda, sessions: list[Any]) -> None:
    """What the default stream reads now comes after what the run has waited for."""
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort").eval()
    given = inputs("mlp")
    with torch.no_grad():
        kept = [model(*given)]

        def drop() -> None:
            with torch.cuda.stream(torch.cuda.default_stream()):
                kept.pop() + 1

        sessions[0].during = drop
        model(*given)
    assert kept == []


def test_changing_the_stream_between_steps(cuda: Cuda, sessions: list[Any]) -> None:
    """The second stream has nothing to do with the first but the weights, which neither changes."""
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort")
    given = inputs("mlp")
    start = torch.cuda.Event()
    model(*given).backward()
    start.record()
    model.zero_grad()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        stream.wait_event(start)
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                model.train_step(*given)
                model.zero_grad()
                outputs = model(*given)
                outputs + 1
                del outputs


def test_gradient_memory_of_a_model_that_is_let_go(cuda: Cuda, sessions: list[Any]) -> None:
    """It was allocated on the default stream, and must not be used there again while another one still works on it."""
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort")
    given, side = inputs("mlp"), torch.cuda.Stream()
    model.train_step(*given)
    (size,) = [flat.numel() for flat in model.engine.training_graph().pool.take()[0].flats]
    model.zero_grad()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model.train_step(*given)
    del model
    sessions.clear()
    gc.collect()
    torch.zeros(size, device="cuda")


def test_half_precision_aliases_are_refreshed_in_order(cuda: Cuda, sessions: list[Any], tmp_path: Any) -> None:
    artifacts = mixed(tmp_path, "_fp16")
    model, reference = toc.OrtModule(artifacts, device="cuda", engine="ort"), toc.OrtModule(artifacts, engine="ort")
    given, start = inputs("mlp"), torch.cuda.Event()
    start.record()
    for step in range(2):
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):  # both read the weights, neither changes them
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                found = model(*given)
            torch.cuda.current_stream().wait_stream(stream)
            torch.testing.assert_close(found.cpu(), reference(*batch("mlp")))
        with torch.no_grad():
            for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
                parameter.mul_(0.5 + step)
                other.mul_(0.5 + step)
        start.record()


def test_the_current_device_is_restored(cuda: Cuda, sessions: list[Any]) -> None:
    model = toc.OrtModule(exported("mlp"), device="cuda:1", engine="ort")
    assert torch.cuda.current_device() == 0
    losses = train(model, toc.OrtOptimizer(model, lr=0.01), "mlp")
    model.eval()(*inputs("mlp", device="cuda:1"))
    assert torch.cuda.current_device() == 0
    assert losses[0].device == torch.device("cuda", 1)


def test_the_current_device_is_restored_when_a_model_is_let_go(cuda: Cuda, sessions: list[Any]) -> None:
    model = toc.OrtModule(exported("mlp"), device="cuda:1", engine="ort")
    optimizer = toc.OrtOptimizer(model, lr=0.01)
    train(model, optimizer, "mlp", 1)
    model.eval()(*inputs("mlp", device="cuda:1"))
    assert len(sessions) == 3
    sessions.clear()
    del model, optimizer
    gc.collect()
    assert torch.cuda.current_device() == 0


def test_an_input_on_another_gpu_is_refused(cuda: Cuda, sessions: list[Any]) -> None:
    for engine in ("ort", "torch"):
        model = toc.OrtModule(exported("mlp"), device="cuda:0", engine=engine)
        with pytest.raises(toc.CheckpointError, match=r"is on cuda:1, the model on cuda:0"):
            model(*inputs("mlp", device="cuda:1"))


def test_the_index_is_fixed_when_the_module_is_made(cuda: Cuda, sessions: list[Any]) -> None:
    for engine in ("ort", "torch"):
        torch.cuda.set_device(1)
        model = toc.OrtModule(exported("mlp"), device="cuda", engine=engine)
        torch.cuda.set_device(0)
        assert model.device == torch.device("cuda", 1)
        assert model(*inputs("mlp", device="cuda:1")).device == torch.device("cuda", 1)


def test_capturing_a_cuda_graph_is_refused(cuda: Cuda, sessions: list[Any]) -> None:
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort")
    optimizer = toc.OrtOptimizer(model)
    given = inputs("mlp")
    model(*given).backward()
    cuda.machine.capturing = True
    with pytest.raises(toc.CheckpointError, match=r"CUDA graph.*engine=\"torch\""):
        model(*given)
    with pytest.raises(toc.CheckpointError, match=r"CUDA graph.*fused=True"):
        optimizer.step()


def test_a_refused_capture_leaves_nothing_behind(cuda: Cuda, sessions: list[Any]) -> None:
    """Memory allocated during a capture would belong to the captured graph, and a session can't be made then at all."""
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort")
    optimizer = toc.OrtOptimizer(model)
    given = inputs("mlp")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.create_moments()
    used = torch.cuda.memory_allocated()
    cuda.machine.capturing = True
    for refused in (lambda: model(*given), lambda: model.train_step(*given), lambda: model.eval()(*given), optimizer.step):
        with pytest.raises(toc.CheckpointError, match="CUDA graph"):
            refused()
    assert sessions == []
    assert torch.cuda.memory_allocated() == used
    cuda.machine.capturing = False
    model.train()(*given).backward()
    optimizer.step()


def test_what_the_user_keeps_is_not_looked_at_in_every_run(cuda: Cuda, sessions: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are collected without waiting for them; dropped at last, their memory is used again."""
    model, looks = toc.OrtModule(exported("mlp"), device="cuda", engine="ort"), [0]
    uses = streams.storage_uses

    def counted(tensor: torch.Tensor) -> int:
        looks[0] += 1
        return uses(tensor)

    given, kept = inputs("mlp"), []
    with torch.no_grad():
        model.eval()
        used = torch.cuda.memory_allocated()
        for _ in range(300):
            kept.append(model(*given))
        monkeypatch.setattr(streams, "storage_uses", counted)
        model(*given)
        assert looks[0] <= 200
        kept.clear()
        for _ in range(10):
            model(*given)
    assert torch.cuda.memory_allocated() <= used + 10 * 512


def test_each_session_frees_its_staging_memory(cuda: Cuda, sessions: list[Any]) -> None:
    """Two sessions that take turns: it must not always be the same one that waits."""
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort")
    first, second = model.fc1.parameters(), model.fc2.parameters()
    optimizer = toc.OrtOptimizer(model, params=[{"params": list(first)}, {"params": list(second), "weight_decay": 0.3}])
    given = inputs("mlp")
    largest = 0
    for _ in range(600):
        model.train_step(*given)
        optimizer.step()
        model.lazy_reset_grad()
        with torch.no_grad():
            model.eval()(*given)
        model.train()
        largest = max([largest, *(session.staging for session in sessions)])
    assert len(sessions) >= 4
    assert largest <= 256 * 256


def test_staging_memory_does_not_grow(cuda: Cuda, sessions: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort")
    optimizer = toc.OrtOptimizer(model)
    given = inputs("mlp")
    largest = 0
    for _ in range(600):
        model.train_step(*given)
        optimizer.step()
        model.lazy_reset_grad()
        largest = max([largest, *(session.staging for session in sessions)])
    assert largest <= 256 * 256
    assert sum(session.synchronised for session in sessions) <= 6  # and hardly a run waits


def test_memory_is_flat(cuda: Cuda, sessions: list[Any]) -> None:
    model = toc.OrtModule(exported("mlp"), device="cuda", engine="ort")
    optimizer = toc.OrtOptimizer(model)
    given = inputs("mlp")

    def steps(count: int) -> int:
        for _ in range(count):
            model(*given).backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.memory_allocated()

    steps(3)
    assert steps(3) == steps(20)
