"""`export_inference`: an ONNX model with the trained weights inside, cut from the eval graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import torch

from ..checkpoint.state import nbytes
from ..dtypes import ONNX_FROM_TORCH
from ..errors import MissingFileError, UnsupportedError
from ..formats.onnx.checkpoint import write_model
from ..storage.files import tensor_bytes
from ..storage.paths import PathLike, as_path, refuse_existing
from .artifacts import Artifacts
from .description import copy_of
from .passes.keep_outputs import keep_outputs
from .passes.rewriting import set_items
from .passes.versions import lower_versions

INLINE_LIMIT = 1 << 30
"""Weights larger than this go into a file `<path>.<hash>.data` next to the model (a protobuf holds 2 GiB at most)."""


def export_inference(
    artifacts: Artifacts,
    tensors: Mapping[str, torch.Tensor],
    path: PathLike,
    outputs: Sequence[str] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write the part of the eval graph that `outputs` need, with `tensors` as its weights.

    `outputs` may name any value of the eval graph; without it all extra outputs are taken, or the loss where there are none. Inputs that
    are then no longer needed (the labels) disappear. An existing file is replaced only with `overwrite`.
    """
    path = as_path(path)
    refuse_existing(path, overwrite)
    if artifacts.eval is None:
        raise MissingFileError(
            "no eval_model.onnx to cut an inference model from", path=artifacts.folder, remedy="Export the artifacts with an eval model."
        )
    model = inference_model(artifacts.eval, artifacts, outputs)
    values = {name: _current(name, artifacts, tensors) for name in _weight_names(model, artifacts)}
    external = sum(nbytes(value) for value in values.values()) > INLINE_LIMIT
    outside = []
    for name, value in values.items():
        item = _tensor(name, value, with_data=not external)
        model.graph.initializer.append(item)
        if external and value.numel():
            outside.append((model.graph.initializer[-1], value))
    write_model(model, outside, path)


def inference_model(graph: onnx.ModelProto, artifacts: Artifacts, outputs: Sequence[str] | None) -> onnx.ModelProto:
    """The nodes between the inputs and `outputs`; weights stay inputs without values."""
    model = copy_of(graph)
    lower_versions(model)
    names = [value.name for value in model.graph.output]
    keep_outputs(model, list(outputs) if outputs is not None else names[1:] or names[:1], artifacts.eval_path)
    return model


def _weight_names(model: onnx.ModelProto, artifacts: Artifacts) -> list[str]:
    """Take the weights out of the graph's inputs."""
    weights = [value.name for value in model.graph.input if value.name in artifacts.parameters or value.name in artifacts.aliases]
    set_items(model.graph.input, [value for value in model.graph.input if value.name not in weights])
    return weights


def _current(name: str, artifacts: Artifacts, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    master = artifacts.aliases.get(name)
    if master is None:
        return tensors[name].detach()
    dtype = next(spec.dtype for spec in artifacts.eval_inputs if spec.name == name)
    return tensors[master].detach().to(dtype)


def _tensor(name: str, value: torch.Tensor, with_data: bool) -> onnx.TensorProto:
    number = ONNX_FROM_TORCH.get(value.dtype)
    if number is None:
        raise UnsupportedError(f"ONNX has no element type {value.dtype}", field=name)
    item = onnx.TensorProto(name=name, data_type=number, dims=list(value.shape))
    if with_data or not value.numel():
        item.raw_data = tensor_bytes(value).tobytes() if value.numel() else b""
    return item
