"""Who executes a training graph. `OrtModule` sees only the `Engine` protocol; PyTorch owns every tensor, engines borrow them.

`parameters` is always the list of tensors for `artifacts.parameters`, in that order; `gradients` are for `artifacts.trainable`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..artifacts import Artifacts
from ..errors import CheckpointError, MissingDependencyError

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class EngineOptions:
    """What a user may choose about the execution. `session_options` (an `onnxruntime.SessionOptions`) is for the ort engine only."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dimensions: Mapping[str, int] = field(default_factory=dict)
    threads: int | None = None
    session_options: Any = None
    provider_options: Mapping[str, Any] = field(default_factory=dict)
    compile: bool = False


class Engine(Protocol):
    """Executes the graphs of one set of artifacts. `seed` determines every random number of the call (None: the graph draws none)."""

    name: str

    def train(self, inputs: Tensors, parameters: Tensors, seed: int | None) -> tuple[torch.Tensor, ...]:
        """Outputs of the training graph, loss first. The loss is attached to autograd through the parameters that require gradients."""

    def step(self, inputs: Tensors, parameters: Tensors, seed: int | None) -> tuple[tuple[torch.Tensor, ...], Tensors]:
        """The same without autograd: outputs, and the loss's gradient for each of `artifacts.trainable`, fresh tensors or free ones."""

    def evaluate(self, inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        """Outputs of the eval graph."""


class OverwritingEngine(Engine, Protocol):
    """An engine that can write over the gradients of an earlier step, for loops that reset them anyway."""

    def step_into(
        self, gradients: Tensors, inputs: Tensors, parameters: Tensors, seed: int | None
    ) -> tuple[tuple[torch.Tensor, ...], Tensors]: ...


Maker = Callable[[Artifacts, EngineOptions], Engine]


def make(name: str, artifacts: Artifacts, options: EngineOptions) -> Engine:
    """The engine called `ort` or `torch`; `auto` is ORT where `onnxruntime-training` is installed, and PyTorch elsewhere."""
    if name == "auto":
        name = "ort" if importlib.util.find_spec("onnxruntime") else "torch"
    if name == "ort":
        from . import ort

        return ort.OrtEngine(artifacts, options)
    if name == "torch":
        if not importlib.util.find_spec(f"{__name__}.torch"):
            raise MissingDependencyError("no engine but ONNX Runtime is built in", remedy="pip install torch-ort-ckpt[ort]")
        module = importlib.import_module(f"{__name__}.torch")
        engine: Engine = module.TorchEngine(artifacts, options)
        return engine
    raise CheckpointError(f"no engine called {name!r}", remedy='Use "ort", "torch" or "auto".')
