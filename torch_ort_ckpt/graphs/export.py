"""`export_artifacts`: training artifacts from an `nn.Module`, with names equal to its `named_parameters()` and `named_buffers()`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..storage.paths import PathLike, as_path
from .artifact_writer import Made, Target, tell_terminal
from .artifacts import Artifacts, OptimizerSpec
from .description import write_order
from .gradients.clients import client_of
from .optimizer import optimizer_spec

_log = logging.getLogger(__name__)

Stage = Callable[[str], None]
"""Called with a short description when a stage of the export begins."""

BUILDERS = ("auto", "torch", "ort")


def export_artifacts(
    module: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor,
    folder: PathLike,
    loss: Any = "cross_entropy",
    optimizer: str | OptimizerSpec | torch.optim.Optimizer | None = "adamw",
    *,
    example_targets: Sequence[torch.Tensor] | Mapping[str, torch.Tensor] | torch.Tensor | None = None,
    frozen: Iterable[str] = (),
    extra_outputs: bool | Sequence[str] = False,
    dynamic_shapes: Mapping[str, Mapping[int, str]] | None = None,
    prefix: str = "",
    builder: str = "auto",
    for_ort: str | None = None,
    exporter: str = "auto",
    opset: int | None = None,
    class_axis: int | None = None,
    nominal: bool = False,
    optimize: bool = True,
    overwrite: bool = False,
    progress: Stage | None = None,
) -> Artifacts:
    """Write training, eval and optimizer model and checkpoint into `folder`: all of them, or (on an error or a crash) none.

    - `example_inputs`: what the module's forward takes, by position or by name, then what the loss takes. Arguments that are not tensors
      stay as they are.
    - `loss`: "cross_entropy", "mse", "bce_with_logits" or "l1" (on the module's first output, against an input `labels` or `target`), a
      module of `torch.nn`, a function of (outputs, targets...), or None where the module itself returns the loss first. The inputs of a
      loss are called as in its signature. Losses of `torch.nn` need no example of their target; for others it is part of
      `example_inputs`, or `example_targets`.
    - `optimizer`: "adamw", "adam" and "sgd" with PyTorch's defaults, an `OptimizerSpec`, a `torch.optim.AdamW`, `Adam` or `SGD` to take
      the hyper-parameters from, or None. `OptimizerSpec(max_norm=...)` clips gradients.
    - `frozen`: names or patterns (`encoder.*`) of parameters without gradients; those that do not require any, or that the loss does not
      depend on, are frozen anyway.
    - `extra_outputs`: also return the module's outputs (True), or the named ones.
    - `dynamic_shapes`: input -> {axis: name of the dimension}; by default axis 0 of every input is `batch`. `{}` fixes all sizes.
      A requested dimension that the module fixes is an error.
    - `class_axis`: where `loss="cross_entropy"` finds the classes in an output with more than two dimensions: 1, as
      `torch.nn.functional.cross_entropy` takes it, or -1, as language models give them.
    - `builder`: who makes the gradients: "torch" (PyTorch; needs no onnxruntime) or "ort" (ONNX Runtime's own builder, which takes an
      `onnxruntime.training.onnxblock.Block` as loss, too). "auto" is "torch", unless such a loss or an `exporter` is given.
    - `for_ort`: the release that will train, "1.16" to "1.19". By default 1.18 and later.
    - `exporter`: for ORT's builder, "dynamo" (PyTorch's current one), "torchscript" (the older one), or "auto": the current one, and the
      older where it fails.
    - `optimize`: write operators that ONNX Runtime runs faster (of a convolution's gradient, of pooling, of batch normalisation, ...),
      chosen by shape; with False, the plain graph that they must equal. ORT's builder has no such choice.
    - `overwrite`: replace artifacts that are already in `folder`.
    - `progress`: called with a short text when a stage of the export begins; by default a line on a terminal, nothing elsewhere.
    """
    tell = progress or tell_terminal
    client = client_of(for_ort)
    target = Target(as_path(folder), client, prefix, nominal, overwrite)
    target.refuse_existing()
    spec = optimizer_spec(optimizer)
    client.refuse_module(module)
    made = _build(
        _builder(builder, loss, exporter),
        module,
        example_inputs,
        loss,
        exporter=exporter,
        example_targets=example_targets,
        class_axis=class_axis,
        frozen=frozen,
        extra_outputs=extra_outputs,
        dynamic_shapes=dynamic_shapes,
        opset=opset,
        optimize=optimize,
        tell=tell,
    )
    tell("writing the artifacts")
    for graph in (made.training, made.evaluation):
        if graph is not None:
            write_order(graph, module)
    return target.write(made, spec, client.state(made.trainable, made.states))


def _build(
    builder: str,
    module: nn.Module,
    example_inputs: Any,
    loss: Any,
    *,
    exporter: str,
    example_targets: Any,
    optimize: bool,
    **options: Any,
) -> Made:
    if builder == "ort":
        from .gradients.ort_forward import build_with_ort

        if example_targets is not None:
            raise CheckpointError("example_targets is for builder='torch'", remedy="Leave it out.")
        return Made(*build_with_ort(module, example_inputs, loss, exporter=exporter, **options))
    from .gradients.contract import training_model
    from .gradients.torch_builder import build

    found = build(module, example_inputs, loss, example_targets=example_targets, optimize=optimize, **options)
    training, as_float = training_model(found.graph, list(found.states))
    states = {name: value.to(torch.float32) if name in as_float else value for name, value in found.states.items()}
    return Made(training, found.evaluation, found.trainable, states)


def _builder(builder: str, loss: Any, exporter: str) -> str:
    if builder not in BUILDERS:
        raise CheckpointError(f"no builder {builder!r}", remedy='Use "auto", "torch" or "ort".')
    from_ort = any(kind.__module__.startswith("onnxruntime.") for kind in type(loss).__mro__)
    if builder == "auto":
        return "ort" if from_ort or exporter != "auto" else "torch"
    if builder == "torch" and (from_ort or exporter != "auto"):
        what = "a loss made of onnxblock" if from_ort else f"exporter={exporter!r}"
        raise CheckpointError(f"{what} is for ONNX Runtime's builder", remedy='Use builder="ort", or a loss in PyTorch.')
    return builder
