"""`export_step_model`: training artifacts as `step_model.onnx` and `state.safetensors`."""

from __future__ import annotations

import dataclasses
import os

import onnx
import torch

from ...checkpoint.state import DEFAULT_LR, CheckpointState, OptimizerGroup
from ...dtypes import TORCH_FROM_ONNX
from ...errors import CheckpointError, UnsupportedError
from ...formats import save
from ...storage.paths import PathLike, as_path
from ...storage.staging import current_files, pending_set
from ..artifacts import Artifacts, OptimizerSpec
from ..optimizer import optimizer_spec
from .lowering import lowered
from .step_model import StepModel, step_model
from .update import moments_of

MODEL, STATE = "step_model.onnx", "state.safetensors"
_SET = "step_model"


def export_step_model(
    artifacts: Artifacts | PathLike,
    folder: PathLike,
    accumulate: int = 1,
    max_norm: float | None = None,
    *,
    optimizer: str | OptimizerSpec | torch.optim.Optimizer | None = None,
    checkpoint: CheckpointState | None = None,
    optimize: bool = True,
    overwrite: bool = False,
) -> None:
    """Write `step_model.onnx`, a graph of standard operators that computes one whole training step, and `state.safetensors`.

    The model runs in any onnxruntime. Its inputs are the batch, every state tensor `X` (parameters, buffers, `<p>.momentum0`,
    `<p>.momentum1`), `lr` (float32, no dimensions) and `step` (int64, no dimensions; 1 for the first update). Its outputs are the loss,
    extra outputs, and `X.new` for every state tensor: feed it back as `X`.

    - `accumulate`: update once in so many batches, with the sum of their gradients. The sums are states too (`<p>.accumulated`), and so
      is the number of batches since the last update (`accumulated.count`). `step` is the number of the update in progress.
    - `max_norm`: clip the gradients' common norm; by default what the optimizer graph does.
    - `optimizer`: instead of the artifacts' own. `torch.optim.SGD` may have momentum, nesterov and weight decay here.
    - `checkpoint`: start from this state instead of the artifacts' own.
    - A model with dropout also takes `seed` (int64, no dimensions): pass another number in every step.
    """
    source = artifacts if isinstance(artifacts, Artifacts) else Artifacts.load(artifacts)
    spec = _spec(source, optimizer, max_norm)
    joint, counters = lowered(source)
    made = step_model(joint, spec, counters, accumulate=accumulate, optimize=optimize)
    state = _state(made, spec, checkpoint if checkpoint is not None else source.state, list(joint.gradients), source)
    place = as_path(folder)
    with pending_set(place, _SET, lambda name: name in (MODEL, STATE), lambda: _refuse_existing(place, overwrite)) as pending:
        onnx.save(made.model, os.fspath(pending.path / MODEL))
        save(state, pending.path / STATE, format="safetensors", single_file=True)
        pending.commit([MODEL, STATE])


def _spec(artifacts: Artifacts, optimizer: str | OptimizerSpec | torch.optim.Optimizer | None, max_norm: float | None) -> OptimizerSpec:
    spec = optimizer_spec(optimizer, for_training_api=False) if optimizer is not None else artifacts.optimizer_spec
    assert spec is not None
    if not spec.known:
        raise UnsupportedError(
            "the hyper-parameters of a .ort optimizer graph can't be read", path=artifacts.optimizer_path, remedy="Pass optimizer=."
        )
    if max_norm is not None and not max_norm > 0:
        raise CheckpointError(f"must be positive, not {max_norm!r}", field="max_norm")
    return spec if max_norm is None else dataclasses.replace(spec, max_norm=float(max_norm))


def _state(made: StepModel, spec: OptimizerSpec, source: CheckpointState, trained: list[str], artifacts: Artifacts) -> CheckpointState:
    """The checkpoint with every state that the graph takes; what it does not have yet starts at zero."""
    if source.nominal:
        raise CheckpointError(
            "the checkpoint is nominal: its parameters have no values", path=artifacts.checkpoint_path, remedy="Complete it first."
        )
    state = CheckpointState(properties=dict(source.properties))
    group = next(iter(source.optimizer.values()), None) or OptimizerGroup(0, DEFAULT_LR, None)
    moments = {f"{name}.{kind}": (name, kind) for name in trained for kind in moments_of(spec)}
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in trained}
    for name, (kind, shape) in made.states.items():
        dtype = TORCH_FROM_ONNX[kind]
        if name in moments:
            owner, moment = moments[name]
            found = group.states.get(owner, {}).get(moment)
            states[owner][moment] = found if isinstance(found, torch.Tensor) else torch.zeros(shape, dtype=dtype)
            continue
        value = source.parameters.get(name)
        if value is None and name in source.frozen.keys() | source.trainable.keys():
            raise UnsupportedError("is not a tensor of numbers", field=name)
        tensor = value.to(dtype) if isinstance(value, torch.Tensor) else torch.zeros(shape, dtype=dtype)
        (state.trainable if name in trained else state.frozen)[name] = tensor
    if missing := sorted(set(trained) - source.parameters.keys()):
        raise CheckpointError(f"has no {', '.join(missing[:5])}, which the graph trains", path=artifacts.checkpoint_path)
    hyperparameters = {**spec.hyperparameters, **spec.beyond_torch}
    state.optimizer["group0"] = OptimizerGroup(group.step, group.initial_lr, group.lr, states, hyperparameters)
    return state


def _refuse_existing(folder: os.PathLike[str], overwrite: bool) -> None:
    found = [] if overwrite else [name for name in (MODEL, STATE) if name in current_files(as_path(folder), _SET)]
    if found:
        raise CheckpointError(
            f"already holds a step model ({', '.join(found)})",
            path=folder,
            remedy="Pass overwrite=True (--overwrite) to replace it, or choose another folder.",
        )
