"""ORT's own gradient builder (`onnxruntime.training.artifacts`): loss and gradients appended to a forward graph."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from ...errors import CheckpointError, MissingDependencyError, UnsupportedError
from ..description import ONNX_ERRORS

LOSSES = ("cross_entropy", "mse", "bce_with_logits", "l1")

IGNORE_INDEX = -100
"""The default `ignore_index` of PyTorch's cross entropy."""


def build_gradients(
    model: onnx.ModelProto,
    trainable: Sequence[str],
    fixed: Sequence[str],
    loss: Any,
    class_axis: int | None,
    extras: Sequence[str],
    folder: Path,
    prefix: str,
) -> None:
    """Write training and eval model and checkpoint to `folder`."""
    try:
        from onnxruntime.training import artifacts
    except ImportError as error:
        raise MissingDependencyError(
            f"making gradient graphs needs onnxruntime-training ({error})",
            remedy='pip install "torch-ort-ckpt[ort]" (Python up to 3.12). `torch-ort-ckpt doctor` shows what works here.',
        ) from error
    from ..onnxruntime_package import ort_errors

    # Only the first output is used for the loss; the others are returned.
    scores = model.graph.output[0].name
    if loss == "cross_entropy":
        scores = _scores(model, class_axis)
    elif class_axis is not None:
        raise CheckpointError("class_axis is for loss='cross_entropy'", remedy="Leave it out.")
    try:
        with quiet_stderr():
            artifacts.generate_artifacts(
                model,
                requires_grad=list(trainable),
                frozen_params=list(fixed),
                loss=_block(loss),
                artifact_directory=folder,
                prefix=prefix,
                additional_output_names=list(extras) or None,
                loss_input_names=[scores],
            )
    except ort_errors() + ONNX_ERRORS as error:
        raise UnsupportedError(
            f"ONNX Runtime can't build the gradient graph: {error}",
            remedy="An operator without a gradient: replace it in the module, or train it with torch_ort_ckpt's torch engine.",
        ) from error


def _block(loss: Any) -> Any:
    from onnxruntime.training import onnxblock

    blocks = {
        "cross_entropy": lambda: onnxblock.loss.CrossEntropyLoss(ignore_index=IGNORE_INDEX),
        "mse": onnxblock.loss.MSELoss,
        "bce_with_logits": onnxblock.loss.BCEWithLogitsLoss,
        "l1": onnxblock.loss.L1Loss,
    }
    if isinstance(loss, str) and loss in blocks:
        return blocks[loss]()
    if loss is None or isinstance(loss, onnxblock.Block):
        return loss
    raise CheckpointError(
        f"no loss {loss!r}" if isinstance(loss, str) else f"loss is {type(loss).__name__}",
        remedy=f"Use one of {', '.join(LOSSES)}, an onnxblock.Block, or None.",
    )


def _scores(model: onnx.ModelProto, class_axis: int | None) -> str:
    """The value that ORT's cross entropy takes: the module's first output with the classes on axis 1, and an input `labels` that fits it.

    onnxblock makes labels without the *last* axis and a loss over axis 1: right for two dimensions only.
    """
    graph = model.graph
    output = graph.output[0]
    sizes = output.type.tensor_type.shape.dim
    rank = len(sizes)
    if rank < 2:
        raise CheckpointError(
            f"cross entropy needs an output with a batch and a class axis; this one has {rank} dimensions", field=output.name
        )
    if class_axis is None and rank > 2:
        raise CheckpointError(
            f"cross entropy over an output with {rank} dimensions can mean two things",
            field=output.name,
            remedy="Pass class_axis=1 (as torch.nn.functional.cross_entropy takes it: batch x classes x ...) "
            "or class_axis=-1 (language models: batch x sequence x classes).",
        )
    axis = 1 if class_axis is None else class_axis
    if not -rank <= axis < rank or axis % rank == 0:
        raise CheckpointError(f"class_axis={class_axis} is not a class axis of an output with {rank} dimensions", field=output.name)
    axis %= rank
    if all(value.name != "labels" for value in graph.input):
        labels = onnx.ValueInfoProto()
        labels.CopyFrom(output)
        labels.name = "labels"
        labels.type.tensor_type.elem_type = onnx.TensorProto.INT64
        del labels.type.tensor_type.shape.dim[axis]
        graph.input.append(labels)
        # onnxblock treats an input as missing as long as no node reads it.
        graph.node.append(helper.make_node("Identity", ["labels"], ["labels.read"]))
    if axis == 1:
        return str(output.name)
    scores = f"{output.name}.classes_first"
    order = [0, axis, *(other for other in range(1, rank) if other != axis)]
    graph.node.append(helper.make_node("Transpose", [output.name], [scores], perm=order))
    graph.value_info.append(helper.make_tensor_value_info(scores, output.type.tensor_type.elem_type, [_size(sizes[i]) for i in order]))
    return scores


def _size(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """ORT's graph builder writes a line per transformation it tries straight to the process's stderr, whatever the log level."""
    sys.stderr.flush()
    saved = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
