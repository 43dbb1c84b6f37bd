"""One architecture: exported with default arguments, then compared with PyTorch on every engine, at other sizes, and over a few steps."""

from __future__ import annotations

import contextlib
import copy
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import torch_ort_ckpt as toc

from .entry import Batch, Entry
from .native import STEPS, Answer, answer, doubled, steps

LOSS, GRADIENT, AFTER_STEPS = 1e-5, 1e-4, 1e-4
_ROUNDING = 10
"""How much of the distance between PyTorch in float32 and in float64 counts as rounding."""
ENGINES = ("ort", "torch", "module")
LR = 1e-3


def check(entry: Entry, lengths: bool = True) -> dict[str, Any]:
    """What held, stage by stage: "ok", or what was wrong."""
    result: dict[str, Any] = {"name": entry.name, "field": entry.field}
    module = entry.module()
    with tempfile.TemporaryDirectory() as folder:
        with _stage(result, "export"):
            artifacts = export(entry, module, f"{folder}/default", entry.dynamic)
            assert artifacts.training is not None
            result["nodes"] = len(artifacts.training.graph.node)
        if result["export"] == "ok":
            known = {size: _known(entry, module, size, None) for size in entry.sizes}
            for engine in ENGINES:
                with _stage(result, engine):
                    run = _runner(engine, artifacts)
                    for size, truth in known.items():
                        _refuse(truth.compare(run), f"batch of {size}")
                with _stage(result, f"{engine} steps"):
                    _compare_steps(entry, module, engine, artifacts)
        if lengths and entry.lengths and entry.sequence and result["export"] == "ok":
            with _stage(result, "lengths"):
                longer = export(entry, module, f"{folder}/longer", _with_lengths(entry))
                for engine in ENGINES[:2]:
                    run = _runner(engine, longer)
                    for size, length in ((entry.sizes[0], entry.lengths[0]), (entry.sizes[1], entry.lengths[1])):
                        _refuse(_known(entry, module, size, length).compare(run), f"{engine}, batch of {size}, length {length}")
    return result


def export(entry: Entry, module: nn.Module, folder: str, dynamic: Any) -> toc.Artifacts:
    inputs, targets = entry.example(entry.sizes[0])
    options = dict(entry.options) if dynamic is None else {**entry.options, "dynamic_shapes": dynamic}
    example: Any = inputs if entry.loss is None else (*inputs.values(), *targets.values())
    return toc.export_artifacts(copy.deepcopy(module), example, folder, loss=entry.loss, **options)


class Known:
    """PyTorch's answer to one batch in float32, and in float64 where the module can be converted."""

    def __init__(self, batch: tuple[Batch, Batch], native: Answer, exact: Answer | None) -> None:
        self.batch, self.native, self.exact = batch, native, exact

    def compare(self, run: Callable[[Batch, Batch], Answer]) -> str:
        """Empty, or what differs most."""
        found, native = run(*self.batch), self.native
        allowed = max(LOSS * max(1.0, abs(native.loss.item())), self._rounding("loss", None))
        if not abs(found.loss.item() - native.loss.item()) <= allowed:
            return f"the loss is {found.loss.item():.7g}, not {native.loss.item():.7g}"
        if missing := set(native.gradients) - set(found.gradients):
            return f"no gradient of {min(missing)} (and {len(missing) - 1} more)"
        largest = max(value.abs().max().item() for value in native.gradients.values())
        worst = ("", 0.0)
        for name, value in native.gradients.items():
            allowed = max(GRADIENT * value.abs().max().item(), self._rounding("gradients", name), 1e-7 * largest)
            error = (found.gradients[name].reshape(value.shape) - value).abs().max().item() / (allowed or 1e-30)
            if not error <= max(1.0, worst[1]):
                worst = (name, error)
        if worst[0]:
            return f"the gradient of {worst[0]} is off by {worst[1] * GRADIENT:.1e}"
        for name, value in native.buffers.items():
            if name in found.buffers and value.is_floating_point():
                allowed = max(LOSS * value.abs().max().item(), self._rounding("buffers", name), 1e-6)
                if not (found.buffers[name].reshape(value.shape) - value).abs().max().item() <= allowed:
                    return f"the buffer {name} is wrong"
        return ""

    def _rounding(self, kind: str, name: str | None) -> float:
        if self.exact is None:
            return 0.0
        first, second = getattr(self.native, kind), getattr(self.exact, kind)
        if name is not None:
            first, second = first[name], second.get(name)
        return 0.0 if second is None else _ROUNDING * (first.double() - second.double()).abs().max().item()


def _known(entry: Entry, module: nn.Module, size: int, length: int | None) -> Known:
    inputs, targets = entry.example(size, length)
    native = answer(entry, module, inputs, targets)
    try:
        exact = answer(entry, copy.deepcopy(module).double(), doubled(inputs), doubled(targets))
    except RuntimeError:  # somewhere the module insists on float32
        exact = None
    return Known((inputs, targets), native, exact)


def _runner(engine: str, artifacts: toc.Artifacts) -> Callable[[Batch, Batch], Answer]:
    """Loss, gradients and buffers of one batch, from fresh weights each time."""

    def run(inputs: Batch, targets: Batch) -> Answer:
        model = _model(engine, artifacts)
        loss = _loss(artifacts, model, inputs, targets)
        loss.backward()
        values = model.named_tensors() if isinstance(model, toc.OrtModule) else dict(model.named_parameters())
        gradients = {name: value.grad for name, value in values.items() if value.grad is not None}
        buffers = values if isinstance(model, toc.OrtModule) else dict(model.named_buffers())
        return Answer(loss.detach(), gradients, {name: value.detach() for name, value in buffers.items() if name not in gradients})

    return run


def _model(engine: str, artifacts: toc.Artifacts) -> Any:
    return toc.to_torch_module(artifacts).train() if engine == "module" else toc.OrtModule(artifacts, engine=engine).train()


def _loss(artifacts: toc.Artifacts, model: Any, inputs: Batch, targets: Batch) -> torch.Tensor:
    given = {**inputs, **targets}
    names = [spec.name for spec in artifacts.inputs]
    found = model(*(given[name] for name in names)) if set(names) <= set(given) else model(*given.values())
    return found[0] if isinstance(found, (tuple, list)) else found


def _compare_steps(entry: Entry, module: nn.Module, engine: str, artifacts: toc.Artifacts) -> None:
    inputs, targets = entry.example(entry.sizes[0])
    native = steps(entry, module, inputs, targets, LR)
    try:
        exact = steps(entry, copy.deepcopy(module).double(), doubled(inputs), doubled(targets), LR)
    except RuntimeError:
        exact = native
    model = _model(engine, artifacts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR) if engine == "module" else toc.OrtOptimizer(model, lr=LR)
    for step in range(STEPS):
        loss = _loss(artifacts, model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        allowed = max(AFTER_STEPS * max(1.0, abs(native[step])), _ROUNDING * abs(native[step] - exact[step]))
        if not abs(loss.item() - native[step]) <= allowed:
            raise AssertionError(f"the loss of step {step + 1} is {loss.item():.7g}, not {native[step]:.7g}")


def _with_lengths(entry: Entry) -> Mapping[str, Mapping[int, str]]:
    inputs, targets = entry.example(entry.sizes[0])
    return {name: {0: "batch", **dict.fromkeys(entry.sequence.get(name, ()), "length")} for name in (*inputs, *targets)}


def _refuse(fault: str, where: str) -> None:
    if fault:
        raise AssertionError(f"{fault} ({where})")


@contextlib.contextmanager
def _stage(result: dict[str, Any], name: str) -> Iterator[None]:
    """Note how a stage ended, and go on: a table of everything is wanted."""
    start = time.perf_counter()
    try:
        yield
        result[name] = "ok"
    except AssertionError as error:
        result[name] = f"wrong: {error}" if str(error) else f"{type(error).__name__} in {_last_line(error)}"
    except Exception as error:
        result[name] = f"{type(error).__name__}: {_short(str(error))}"
        if operator := re.search(r"aten[.:]+\w+(\.\w+)?|onnx operator \w+", str(error)):
            result.setdefault("operator", operator.group(0).replace("::", "."))
    result[f"{name} seconds"] = round(time.perf_counter() - start, 1)


def _last_line(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename.rsplit('site-packages/')[-1]}:{trace.tb_lineno}" if trace else "?"


def _short(text: str) -> str:
    return " ".join(text.split())[:400]
