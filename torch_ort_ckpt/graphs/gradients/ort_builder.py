"""ORT's own gradient builder (`onnxruntime.training.artifacts`): loss and gradients appended to a forward graph.

It runs in a process of its own: on some graphs it crashes, and it writes a line per transformation straight to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from ...errors import CheckpointError, MissingDependencyError, UnsupportedError
from ..description import ONNX_ERRORS, load_model
from .losses import IGNORE_INDEX, NAMES

_REQUEST, _FORWARD, _ERROR = "request.json", "forward.onnx", "error.txt"


def build_gradients(
    model: onnx.ModelProto, trainable: Sequence[str], fixed: Sequence[str], loss: Any, class_axis: int | None, extras: Sequence[str]
) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """The training and the eval model."""
    _require_builder()
    _check_loss(loss)
    # Only the first output is used for the loss; the others are returned.
    scores = model.graph.output[0].name
    if loss == "cross_entropy":
        scores = _scores(model, class_axis)
    elif class_axis is not None:
        raise CheckpointError("class_axis is for loss='cross_entropy'", remedy="Leave it out.")
    request = {"trainable": list(trainable), "fixed": list(fixed), "extras": list(extras), "scores": scores}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx.save(model, folder / _FORWARD)
        if loss is None or isinstance(loss, str):
            (folder / _REQUEST).write_text(json.dumps(request | {"loss": loss}), encoding="utf-8")
            code, said = _in_new_process(folder)
        else:  # an object that may be of a class which no other process can import
            (folder / _REQUEST).write_text(json.dumps(request), encoding="utf-8")
            code, said = _in_copy_of_this_process(folder, loss), ""
        _raise_error(folder, code, said)
        return load_model(folder / "training_model.onnx", weights=True), load_model(folder / "eval_model.onnx", weights=True)


def run_request(folder: Path, block: Any = None) -> None:
    """In the process of its own: make the artifacts in `folder`, or write why not."""
    from onnxruntime.training import artifacts

    from ..onnxruntime_package import ort_errors

    request = json.loads((folder / _REQUEST).read_text(encoding="utf-8"))
    try:
        artifacts.generate_artifacts(
            load_model(folder / _FORWARD, weights=True),
            requires_grad=request["trainable"],
            frozen_params=request["fixed"],
            loss=_named_block(request["loss"]) if "loss" in request else block,
            artifact_directory=folder,
            additional_output_names=request["extras"] or None,
            loss_input_names=[request["scores"]],
        )
    except ort_errors() + ONNX_ERRORS as error:
        (folder / _ERROR).write_text(str(error), encoding="utf-8")


def _in_new_process(folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", f"{__package__}.ort_builder", os.fspath(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", env=environment, check=False)
    return done.returncode, done.stderr


def _in_copy_of_this_process(folder: Path, block: Any) -> int:
    if not hasattr(os, "fork"):
        raise UnsupportedError("a loss made of onnxblock needs a system with fork", remedy="Write the loss in PyTorch.")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            run_request(folder, block)
            code = 0
        finally:
            os._exit(code)  # nothing of the parent's may be finished twice
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _raise_error(folder: Path, code: int, said: str) -> None:
    error = folder / _ERROR
    if error.exists():
        raise UnsupportedError(
            f"ONNX Runtime can't build the gradient graph: {error.read_text(encoding='utf-8').strip()}",
            remedy='An operator without a gradient: use builder="torch", or replace it in the module.',
        )
    if code < 0:
        raise UnsupportedError(
            f"ONNX Runtime's gradient builder crashed ({signal.Signals(-code).name})",
            remedy='Use builder="torch", or replace the operator that it can not take.',
        )
    if code:
        lines = [line for line in said.strip().splitlines() if line.strip()]
        raise UnsupportedError(
            f"ONNX Runtime's gradient builder failed: {lines[-1] if lines else f'exit code {code}'}",
            remedy='Use builder="torch"; `torch-ort-ckpt doctor` shows what works here.',
        )


def _require_builder() -> None:
    if find_spec("onnxruntime") is None or find_spec("onnxruntime.training") is None:
        raise MissingDependencyError(
            "ONNX Runtime's gradient builder needs onnxruntime-training",
            remedy='Use builder="torch", or pip install "torch-ort-ckpt[ort]" (Python up to 3.12).',
        )


def _check_loss(loss: Any) -> None:
    if loss is None or (isinstance(loss, str) and loss in NAMES):
        return
    from onnxruntime.training import onnxblock

    if not isinstance(loss, onnxblock.Block):
        raise CheckpointError(
            f"no loss {loss!r}" if isinstance(loss, str) else f"loss is {type(loss).__name__}",
            remedy=f"ONNX Runtime's builder takes one of {', '.join(NAMES)}, an onnxblock.Block, or None.",
        )


def _named_block(name: str | None) -> Any:
    from onnxruntime.training import onnxblock

    if name is None:
        return None
    return {
        "cross_entropy": lambda: onnxblock.loss.CrossEntropyLoss(ignore_index=IGNORE_INDEX),
        "mse": onnxblock.loss.MSELoss,
        "bce_with_logits": onnxblock.loss.BCEWithLogitsLoss,
        "l1": onnxblock.loss.L1Loss,
    }[name]()


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


if __name__ == "__main__":
    run_request(Path(sys.argv[1]))
