"""Engines execute training graphs. `OrtModule` uses only the `Engine` protocol; PyTorch owns every tensor, engines borrow them.

`parameters` is always the list of tensors for `artifacts.parameters`, in that order; `gradients` are for `artifacts.trainable`.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, empty
from torch import device as Device

from ..cuda import devices
from ..cuda.kernels import fallbacks
from ..errors import CheckpointError, UnsupportedError
from ..graphs.artifacts import Artifacts
from ..graphs.description import TensorSpec

logger = logging.getLogger(__name__)

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class EngineOptions:
    """Execution options.  `session_options` (an `onnxruntime.SessionOptions`) is for the ort engine only."""

    device: Device = field(default_factory=lambda: Device("cpu"))
    dimensions: Mapping[str, int] = field(default_factory=dict)
    threads: int | None = None
    session_options: Any = None
    provider_options: Mapping[str, Any] = field(default_factory=dict)
    compile: bool = False


class Engine(Protocol):
    """Executes the graphs of one set of artifacts. `seed` determines every random number of the call (None: the graph draws none)."""

    name: str
    """For messages and logs. What an engine can do is in the attributes below."""

    reason: str
    """Why this engine was taken, and what it runs on."""

    differentiable: bool
    """Whether inputs and extra outputs take part in autograd, also in evaluation, and random numbers come from torch's generator."""

    runs_optimizer_graph: bool
    """Whether `optimizer_model.onnx` can run on this device too, by `GraphUpdater`; otherwise PyTorch does the same mathematics."""

    prefers_adjacent_parameters: bool
    """Whether the optimizer graph is faster if parameters are adjacent in memory (see `ort.memory`)."""

    def input_specs(self, parameters: Tensors) -> Sequence[TensorSpec]:
        """The user's inputs, in order. Their types follow the parameters' where the engine supports it (`model.bfloat16()`)."""

    def train(self, inputs: Tensors, parameters: Tensors, seed: int | None) -> tuple[Tensor, ...]:
        """Outputs of the training graph, loss first. The loss is attached to autograd through the parameters that require gradients."""

    def step(
        self, inputs: Tensors, parameters: Tensors, seed: int | None, reuse: Tensors | None = None
    ) -> tuple[tuple[Tensor, ...], Tensors]:
        """The same without autograd: outputs, and the gradient of each of `artifacts.trainable`, in tensors that nothing else uses.

        `reuse` are the gradients of an earlier step, which are no longer needed: the engine may overwrite and return them."""

    def evaluate(self, inputs: Tensors, parameters: Tensors) -> tuple[Tensor, ...]:
        """Outputs of the eval graph."""


Maker = Callable[[Artifacts, EngineOptions], Engine]


def make(name: str, artifacts: Artifacts, options: EngineOptions) -> Engine:
    """The engine called `ort` or `torch`; `auto` takes one by a fixed rule.

    The rule (`benchmarks/stock.py` has the figures): ONNX Runtime, if it is installed, runs on the device and accepts the graphs; PyTorch
    otherwise, and where ONNX Runtime would have to build the gradients again at each start, which takes seconds to minutes (graphs that ORT
    made, in a stock build), or wait for kernels on the CPU in each step (on CUDA). It depends on the artifacts, the device and what is
    installed: a resumed run takes the same engine.
    """
    if name == "auto":
        return _make_either(artifacts, options)
    if name == "ort":
        from .ort import engine as ort

        return ort.OrtEngine(artifacts, options)
    if name == "torch":
        from .torch import TorchEngine

        return TorchEngine(artifacts, options)
    raise CheckpointError(f"no engine called {name!r}", remedy='Use "ort", "torch" or "auto".')


def usable_device(device: str | Device) -> Device:
    """The device by name, after checking that PyTorch can use it here."""
    try:
        found = Device(device)
        if found.type != "cuda":
            found = empty(0, device=found).device  # as tensors name it: "cpu:0" is "cpu" there, and "mps" is "mps:0"
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"device {device}: PyTorch can't use it here ({reason})", remedy='Use device="cpu".') from error
    return devices.present(found) if found.type == "cuda" else found


def _make_either(artifacts: Artifacts, options: EngineOptions) -> Engine:
    """ORT if it accepts the graphs. The sessions are created at once: only ORT knows which kernels it lacks."""
    reason = why_not_ort(options) or _slow_on_cuda(artifacts, options) or _slow_to_start(artifacts)
    if reason is None:
        from .ort import engine as ort

        engine = ort.OrtEngine(artifacts, options)
        try:
            engine.prepare()
            engine.reason = f"{engine.reason} runs these graphs"
            logger.info("engine: ort (%s)", engine.reason)
            return engine
        except CheckpointError as error:
            if artifacts.training is None and artifacts.eval is None:  # `.ort` files, which PyTorch can't run either
                raise
            reason = error.message if error.field is None else f"{error.field}: {error.message}"
    logger.info("engine: torch (%s)", reason)
    try:
        chosen = make("torch", artifacts, options)
        chosen.reason = reason
        return chosen
    except CheckpointError as error:
        both = f"neither engine runs these graphs (ort: {reason}; torch: {error.message})"
        raise UnsupportedError(both, path=error.path, field=error.field, remedy=error.remedy) from error


def why_not_ort(options: EngineOptions) -> str | None:
    """Why ONNX Runtime can't run here; None if it can."""
    if not importlib.util.find_spec("onnxruntime"):
        return "onnxruntime is not installed"
    if options.device.type != "cpu" and options.device.type != "cuda":
        return f"onnxruntime does not run on {options.device.type} here"
    return None


def _slow_to_start(artifacts: Artifacts) -> str | None:
    """Why PyTorch is the better engine for these graphs in the installed build."""
    from ..graphs.standard.lowering import is_standard
    from .ort.build import installed

    try:
        if artifacts.training is None or installed().trains or is_standard(artifacts.training):
            return None
    except CheckpointError as error:  # it can't be imported, or is too old
        return error.message
    return f'{installed()} would build the gradients again at each start; engine="ort" does, toc.rebuild_artifacts does it once'


def _slow_on_cuda(artifacts: Artifacts, options: EngineOptions) -> str | None:
    """Why PyTorch is the better engine on CUDA: some of ONNX Runtime's kernels are for the CPU only, and every step waits for them."""
    if options.device.type != "cuda" or artifacts.training is None:
        return None
    names = fallbacks(artifacts.operators)
    return f"onnxruntime-training has no CUDA kernel for {', '.join(names)}" if names else None
