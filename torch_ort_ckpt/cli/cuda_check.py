"""What only hardware can show, behind `torch-ort-ckpt doctor --cuda` and the tests marked `cuda`.

Each function tries one promise on a device and returns what it measured, in words. Where the promise does not hold it raises a
`CheckpointError`, an `AssertionError` (numbers that differ) or PyTorch's `RuntimeError`.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..cuda.devices import PROVIDER
from ..engines import EngineOptions, why_not_ort
from ..errors import CheckpointError
from ..runtime.module import OrtModule
from ..runtime.optimizer import OrtOptimizer
from ..training.manager import CheckpointManager
from .cuda_subjects import Subject, subjects, with_half_weights
from .doctor import ABSENT, PROBLEM, WORKS, Check

SANITIZER = "compute-sanitizer --tool memcheck python -m torch_ort_ckpt doctor --cuda"
"""Finds accesses outside of memory; CUDA's own program, much slower."""

_REPORT = "Please report it with this table."
_GROWTH = 8 << 20
"""Bytes by which the device's used memory may differ between two moments: other programs use it too."""


def examine(device: torch.device) -> Iterator[Check]:
    """Every check, in a temporary folder; a row as soon as it is known."""
    with tempfile.TemporaryDirectory(prefix="torch-ort-ckpt-") as name:
        folder = Path(name)
        found = subjects(folder)
        half = [with_half_weights(found[0], dtype, folder / str(dtype)) for dtype in (torch.float16, torch.bfloat16)]
        yield from rows(found, half, device, folder)


def rows(found: list[Subject], half: list[Subject], device: torch.device, folder: Path, steps: int = 500) -> Iterator[Check]:
    """The checks of these models, one row each."""
    ways = [("torch", True)]
    if (reason := why_not(device)) is None:
        ways = [("ort", False), ("ort", True), *ways]
    else:
        yield Check("cuda", "engine ort", ABSENT, reason, "torch-ort-ckpt doctor")
    first = found[0]
    for engine, fused in ways:
        way = f"engine {engine}, {'fused' if fused else 'graph'} optimizer"
        for subject in found:
            yield _row(f"{way}: {subject.name} equals the CPU", functools.partial(parity, subject, device, engine, fused))
        for subject in half if engine == "ort" else ():
            yield _row(f"{way}: {subject.name} equals the CPU", functools.partial(parity, subject, device, engine, fused))
        yield _row(f"{way}: a step does not wait", functools.partial(no_waits, first, device, engine, fused))
        yield _row(f"{way}: memory is flat", functools.partial(flat_memory, first, device, engine, fused, steps))
        yield _row(f"{way}: asynchronous save", functools.partial(asynchronous_save, first, device, engine, fused, folder / way))
        yield _row(f"{way}: speed", functools.partial(speed, first, device, engine, fused))
    for engine in dict.fromkeys(engine for engine, _ in ways):
        yield _row(f"engine {engine}: two streams", functools.partial(two_streams, first, device, engine))
        if torch.cuda.device_count() < 2:
            yield Check("cuda", f"engine {engine}: two GPUs", ABSENT, "this machine has one")
        else:
            yield _row(f"engine {engine}: two GPUs", functools.partial(two_gpus, first, engine))


def why_not(device: torch.device) -> str | None:
    """Why ONNX Runtime can't run on CUDA here; None if it can."""
    if (reason := why_not_ort(EngineOptions(device=device))) is not None:
        return reason
    import onnxruntime

    return None if PROVIDER in onnxruntime.get_available_providers() else "this build of onnxruntime has no CUDA provider"


def environment(device: torch.device) -> str:
    """Versions and hardware, for the top of a report."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    packages = sorted(set(importlib.metadata.packages_distributions().get("onnxruntime", ())))
    found = [f"{name} {importlib.metadata.version(name)}" for name in packages] or ["no onnxruntime"]
    return f"{', '.join(names)}; on {device}; torch {torch.__version__} with CUDA {torch.version.cuda}; {', '.join(found)}"


# the checks


def parity(subject: Subject, device: torch.device, engine: str, fused: bool, steps: int = 5) -> str:
    """Losses, gradients, running statistics and updates on the device equal those on the CPU.

    Both take the same gradients in an update: Adam turns a gradient that is zero but for rounding into a whole step in either direction.
    """
    cpu = torch.device("cpu")
    model, optimizer = _made(subject, device, engine, fused)
    reference, other = _made(subject, cpu, engine, fused)
    gap = 0.0
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for seed in range(steps):
            loss, expected = model(*subject.batch(seed, device)), reference(*subject.batch(seed, cpu))
            loss.backward()
            expected.backward()
            torch.testing.assert_close(loss.detach().cpu(), expected.detach(), rtol=1e-3, atol=1e-5)
            gap = max(gap, _compare_gradients(model, reference))
            optimizer.step()
            other.step()
            for (name, value), right in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
                torch.testing.assert_close(value.cpu(), right, rtol=1e-3, atol=1e-5, msg=functools.partial(_named, name))
            optimizer.zero_grad()
            other.zero_grad()
    return f"{steps} steps, gradients within {gap:.1e} of the largest"


def no_waits(subject: Subject, device: torch.device, engine: str, fused: bool) -> str:
    """PyTorch refuses what would wait for the device. It does not see ONNX Runtime's own waits."""
    model, optimizer = _made(subject, device, engine, fused)
    given = subject.batch(0, device)
    _step(model, optimizer, given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            _step(model, optimizer, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "3 steps under set_sync_debug_mode('error')"


def flat_memory(subject: Subject, device: torch.device, engine: str, fused: bool, steps: int = 500) -> str:
    """Neither PyTorch's memory nor the device's (which ONNX Runtime's arena is part of) grows."""
    model, optimizer = _made(subject, device, engine, fused)
    given = subject.batch(0, device)

    def used() -> tuple[int, int]:
        gc.collect()  # what earlier checks left must not be freed between the two measurements
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return torch.cuda.memory_allocated(device), total - free

    for _ in range(max(2, steps // 10)):
        _step(model, optimizer, given)
    before = used()
    for _ in range(steps):
        _step(model, optimizer, given)
    after = used()
    if after[0] > before[0] or after[1] - before[1] > _GROWTH:
        raise CheckpointError(
            f"{steps} steps: PyTorch's memory went from {before[0]} to {after[0]} bytes, the device's from {before[1]} to {after[1]}",
            remedy=_REPORT,
        )
    return f"{steps} steps, {after[0]} bytes of PyTorch's before and after"


def two_streams(subject: Subject, device: torch.device, engine: str, rounds: int = 50) -> str:
    """Two streams that nothing orders with each other use one model in turn, while memory is freed and used again."""
    model, _ = _made(subject, device, engine, True)
    given = [subject.batch(seed, device) for seed in range(2)]
    parameters = [value for value in model.parameters() if value.requires_grad]

    def results(batch: list[torch.Tensor]) -> torch.Tensor:
        loss = model(*batch)
        gradients = torch.autograd.grad(loss, parameters)
        return torch.stack([loss.detach(), *(gradient.norm() for gradient in gradients)])

    expected = [results(batch) for batch in given]
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]  # type: ignore[no-untyped-call]  # torch leaves it untyped
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(rounds):
        for stream, batch, kept in zip(streams, given, found, strict=True):
            with torch.cuda.stream(stream):
                kept.append(results(batch))
                for value in parameters:
                    torch.full_like(value, torch.nan)  # in the memory that a gradient has just left
    torch.cuda.synchronize(device)
    for right, kept in zip(expected, found, strict=True):
        for result in kept:
            torch.testing.assert_close(result.cpu(), right.cpu(), rtol=1e-3, atol=1e-5)
    return f"{rounds} rounds on each"


def two_gpus(subject: Subject, engine: str) -> str:
    """A model on the second GPU while the first is the current one, which stays so."""
    with torch.cuda.device(0):
        shown = parity(subject, torch.device("cuda", 1), engine, True)
        if (now := torch.cuda.current_device()) != 0:
            raise CheckpointError(f"the current device was changed from 0 to {now}", remedy=_REPORT)
    return f"on cuda:1: {shown}"


def asynchronous_save(subject: Subject, device: torch.device, engine: str, fused: bool, folder: Path) -> str:
    """A save in the background holds the values of its moment though training goes on at once."""
    model, optimizer = _made(subject, device, engine, fused)
    given = subject.batch(0, device)
    _step(model, optimizer, given)
    with CheckpointManager(folder, async_save=True, durable=False) as manager:
        expected = {name: value.cpu() for name, value in model.state_dict().items()}
        manager.save(1, model, optimizer)
        for _ in range(3):
            _step(model, optimizer, given)
        manager.wait()
        manager.restore(model, optimizer)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.cpu(), expected[name], rtol=0, atol=0, msg=functools.partial(_named, name))
    return "what was saved is what was there, though three steps followed at once"


def speed(subject: Subject, device: torch.device, engine: str, fused: bool, steps: int = 200) -> str:
    """Steps per second, beside PyTorch's own module and AdamW; the two take turns."""
    model, optimizer = _made(subject, device, engine, fused)
    native = subject.module().to(device)
    adamw = torch.optim.AdamW(native.parameters(), foreach=True)
    x, y = subject.batch(0, device)

    def native_step() -> None:
        torch.nn.functional.cross_entropy(native(x), y).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        adamw.step()
        adamw.zero_grad()

    turns: list[tuple[Callable[[], None], list[float]]] = [
        (functools.partial(_step, model, optimizer, [x, y]), []),
        (native_step, []),
    ]
    for _ in range(4):  # the first turn is for warming up
        for step, times in turns:
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize(device)
            times.append((time.perf_counter() - start) / steps)
    own, theirs = (min(times[1:]) for _, times in turns)
    return f"{own * 1e6:.0f} us a step, PyTorch {theirs * 1e6:.0f} us ({theirs / own:.2f} times its speed)"


# what they share


def _row(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check("cuda", name, WORKS, check())
    except (CheckpointError, AssertionError, RuntimeError) as error:
        return Check("cuda", name, PROBLEM, " ".join(str(error).split())[:400])


def _made(subject: Subject, device: torch.device, engine: str, fused: bool) -> tuple[OrtModule, OrtOptimizer]:
    model = OrtModule(subject.artifacts, device=device, engine=engine)
    return model, OrtOptimizer(model, lr=0.01, fused=fused)


def _step(model: OrtModule, optimizer: OrtOptimizer, given: list[torch.Tensor]) -> None:
    model(*given).backward()
    optimizer.step()
    optimizer.zero_grad()


def _compare_gradients(model: OrtModule, reference: OrtModule) -> float:
    """The largest difference, by the size of the largest gradient; the reference then takes the model's."""
    pairs = [
        (value.grad.cpu(), right.grad)
        for value, right in zip(model.parameters(), reference.parameters(), strict=True)
        if value.grad is not None and right.grad is not None
    ]
    largest = max(float(right.abs().max()) for _, right in pairs)
    gap = 0.0
    for found, right in pairs:
        gap = max(gap, float((found - right).abs().max()) / largest)
        right.copy_(found)
    if not gap < 1e-3:
        raise CheckpointError(f"gradients differ by {gap:.1e} of the largest", remedy=_REPORT)
    return gap


def _named(name: str, text: Any) -> str:
    return f"{name}: {text}"
