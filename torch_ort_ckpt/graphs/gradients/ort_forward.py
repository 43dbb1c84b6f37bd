"""Artifacts by ONNX Runtime's own gradient builder: PyTorch exports the forward graph, ORT appends loss and gradients."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import numpy_helper
from torch import nn

from ...dtypes import ALIASABLE
from ...errors import CheckpointError, UnsupportedError
from ..description import load_model
from ..limits import refuse_control_flow, refuse_frozen_recurrent
from ..passes.batch_norm_order import chain_statistics
from ..passes.initializer_names import rename_initializers
from ..passes.padding_gradient import stop_padding_gradients
from ..passes.pipelines import EVALUATION, apply, repair_forward, repair_training
from ..passes.versions import lower_versions
from .dynamic_check import BATCH_NORMS, check_dynamic, refuse_fixed
from .ort_builder import build_gradients
from .trainable import trainable_names

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

_log = logging.getLogger(__name__)


def build_with_ort(
    module: nn.Module,
    example_inputs: Any,
    loss: Any,
    *,
    class_axis: int | None,
    frozen: Iterable[str],
    extra_outputs: bool | Sequence[str],
    dynamic_shapes: Mapping[str, Mapping[int, str]] | None,
    exporter: str,
    opset: int | None,
    tell: Callable[[str], None],
) -> tuple[onnx.ModelProto, onnx.ModelProto, list[str], dict[str, torch.Tensor]]:
    """Training and eval model, the trainable parameters, and everything the checkpoint holds."""
    inputs = _named_inputs(module, example_inputs)
    dynamic = {name: {0: "batch"} for name, value in inputs.items() if value.dim()} if dynamic_shapes is None else dynamic_shapes
    trainable = trainable_names(module, frozen)
    _refuse_statistics(module)
    padding = _padding_rows(module)
    tell("exporting the forward graph")
    model = _export(module, inputs, dynamic, trainable, exporter, opset, tell)
    for line in repair_forward(model):
        _log.info("%s", line)
    buffers = {name for name, _ in module.named_buffers()}
    initializers = {tensor.name for tensor in model.graph.initializer}
    fixed = [name for name, _ in module.named_parameters() if name in initializers and name not in trainable]
    fixed += sorted(buffers & initializers)
    extras = _extra_outputs(model, extra_outputs, loss)
    tell("building the gradient graph")
    training, evaluation = build_gradients(model, trainable, fixed, loss, class_axis, extras)
    refuse_frozen_recurrent(training)
    chain_statistics(training, evaluation)
    for line in repair_training(training):
        _log.info("%s", line)
    stop_padding_gradients(training, padding)
    apply(evaluation, EVALUATION)
    for graph in (training, evaluation):
        lower_versions(graph)
        refuse_fixed(graph, dynamic)
    return training, evaluation, trainable, _states(module, trainable, set(fixed))


def _named_inputs(module: nn.Module, example: Any) -> dict[str, torch.Tensor]:
    if isinstance(example, Mapping):
        return dict(example)
    values = [example] if isinstance(example, torch.Tensor) else list(example)
    names = [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    names += [f"input{index}" for index in range(len(names), len(values))]  # *args
    return dict(zip(names, values, strict=False))


def _refuse_statistics(module: nn.Module) -> None:
    """Raise for running statistics that no graph can compute as PyTorch does: they would be silently wrong."""
    for name, part in module.named_modules():
        if isinstance(part, _INSTANCE_NORMS) and part.track_running_stats:
            what = "an InstanceNorm that tracks running statistics, which no exporter writes"
            raise UnsupportedError(what, field=name, remedy="Pass track_running_stats=False.")
        if isinstance(part, BATCH_NORMS) and part.track_running_stats and part.momentum is None:
            what = "a BatchNorm with momentum=None, whose average over all batches ONNX can't express"
            raise UnsupportedError(what, field=name, remedy="Give it a momentum, 0.1 for example.")


def _export(
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    dynamic: Mapping[str, Mapping[int, str]],
    trainable: Sequence[str],
    exporter: str,
    opset: int | None,
    tell: Callable[[str], None],
) -> onnx.ModelProto:
    makers = {"dynamo": _export_current, "torchscript": _export_older}
    if exporter != "auto" and exporter not in makers:
        raise CheckpointError(f"no exporter {exporter!r}", remedy='Use "auto", "dynamo" or "torchscript".')
    failures = []
    for name, maker in makers.items():
        if exporter not in ("auto", name):
            continue
        twin = copy.deepcopy(module).cpu().train()  # exporting in training mode runs the module, which would shift BatchNorm's statistics
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), _quiet_registration():
                warnings.simplefilter("ignore")
                model = maker(twin, inputs, dynamic, opset)
            rename_initializers(model, _tied_names(module))
            if missing := sorted(set(trainable) - {tensor.name for tensor in model.graph.initializer}):
                raise UnsupportedError(
                    f"the exporter lost or renamed {', '.join(missing[:5])}", remedy='Try the other exporter ("torchscript" or "dynamo").'
                )
            _set_values(model, module)
            lower_versions(model)
            refuse_control_flow(model, trainable)
            check_dynamic(model, module, inputs, dynamic)
            return model
        except _EXPORT_ERRORS as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
            tell(f"{name} exporter failed, {failures[-1]}")
    raise UnsupportedError(
        f"no exporter can express this module ({'; '.join(failures)})",
        remedy="Simplify the forward, or export it yourself and call onnxruntime.training.artifacts.generate_artifacts.",
    )


_EXPORT_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ImportError, CheckpointError)
"""Exceptions that exporters have been seen to raise; all failures are reported if none succeeds."""


@contextlib.contextmanager
def _quiet_registration() -> Iterator[None]:
    """PyTorch's exporter warns about every missing torchvision operator, needed or not."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _export_current(
    module: nn.Module, inputs: Mapping[str, torch.Tensor], dynamic: Mapping[str, Mapping[int, str]], opset: int | None
) -> onnx.ModelProto:
    dims = {name: torch.export.Dim(name) for sizes in dynamic.values() for name in sizes.values()}
    shapes = {name: {axis: dims[dim] for axis, dim in dynamic.get(name, {}).items()} for name in inputs}
    # optimize=True would fold BatchNorm and rename weights: wrong gradients without any error.
    program = torch.onnx.export(
        module,
        (),
        kwargs=dict(inputs),
        dynamo=True,
        optimize=False,
        opset_version=opset or 18,
        dynamic_shapes=shapes if dims else None,
        verbose=False,
    )
    if program is None:
        raise UnsupportedError("the exporter returned nothing", remedy='Try exporter="torchscript".')
    return _rename_outputs(program.model_proto)


def _export_older(
    module: nn.Module, inputs: Mapping[str, torch.Tensor], dynamic: Mapping[str, Mapping[int, str]], opset: int | None
) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "forward.onnx"
        torch.onnx.export(
            module,
            tuple(inputs.values()),
            path,
            dynamo=False,
            opset_version=opset or 15,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            input_names=list(inputs),
            dynamic_axes={name: dict(sizes) for name, sizes in dynamic.items() if sizes},
        )
        return _rename_outputs(load_model(path, weights=True))


def _rename_outputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """`output`, or `output0`, `output1`, ...: the names of extra outputs."""
    outputs = list(model.graph.output)
    taken = {tensor.name for tensor in model.graph.initializer} | {value.name for value in model.graph.input}
    for index, value in enumerate(outputs):
        new = "output" if len(outputs) == 1 else f"output{index}"
        if value.name in taken or new in taken:
            continue
        for node in model.graph.node:
            for names in (node.input, node.output):
                for position, name in enumerate(names):
                    if name == value.name:
                        names[position] = new
        value.name = new
    return model


def _tied_names(module: nn.Module) -> dict[str, str]:
    """Second and later names of tied parameters and buffers -> the first."""
    first = {id(value): name for name, value in [*module.named_parameters(), *module.named_buffers()]}
    everything = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: first[id(value)] for name, value in everything if first[id(value)] != name}


def _padding_rows(module: nn.Module) -> dict[str, int]:
    """Embedding weight -> the row without gradient."""
    names = {id(value): name for name, value in module.named_parameters()}
    found: dict[str, set[int | None]] = {}
    for part in module.modules():
        if isinstance(part, nn.Embedding) and id(part.weight) in names:
            found.setdefault(names[id(part.weight)], set()).add(part.padding_idx)
    for name, rows in found.items():
        if len(rows) > 1:
            raise UnsupportedError(
                "several embeddings with one weight and different padding_idx: ONNX can't tell them apart",
                field=name,
                remedy="Give all of them the same padding_idx.",
            )
    return {name: row for name, (row,) in found.items() if row is not None}


def _set_values(model: onnx.ModelProto, module: nn.Module) -> None:
    """The weights as they are in the module, not as the exporter's trial run left them."""
    values = dict([*module.named_parameters(), *module.named_buffers()])
    for index, tensor in enumerate(model.graph.initializer):
        value = values.get(tensor.name)
        if value is not None and value.dtype != torch.bfloat16 and list(tensor.dims) == list(value.shape):
            model.graph.initializer[index].CopyFrom(numpy_helper.from_array(value.detach().cpu().numpy(), tensor.name))


def _extra_outputs(model: onnx.ModelProto, wanted: bool | Sequence[str], loss: Any) -> list[str]:
    outputs = [value.name for value in model.graph.output]
    if wanted is True:
        return outputs if loss is not None else outputs[1:]
    names = list(wanted or ())
    if unknown := [name for name in names if name not in outputs]:
        raise CheckpointError(f"the module has no output {unknown[0]!r}", remedy=f"It has: {', '.join(outputs)}.")
    return names


def _states(module: nn.Module, trainable: Sequence[str], fixed: set[str]) -> dict[str, torch.Tensor]:
    parameters = {name: value.detach().cpu() for name, value in module.named_parameters()}
    buffers = {name: value.detach().cpu() for name, value in module.named_buffers()}
    # Buffers that no graph reads (BatchNorm's num_batches_tracked) are kept: ORT preserves them.
    kept = {name: value for name, value in buffers.items() if name in fixed or value.dtype in ALIASABLE}
    return {name: value for name, value in parameters.items() if name in trainable or name in fixed} | kept
