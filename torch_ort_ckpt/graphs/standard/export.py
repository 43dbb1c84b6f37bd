"""`export_step_model`: training artifacts as `step_model.onnx` and `state.safetensors`."""

from __future__ import annotations

import dataclasses
import os

import onnx
import torch

from ...checkpoint.state import DEFAULT_LR, CheckpointState, OptimizerGroup
from ...dtypes import ONNX_FROM_TORCH, TORCH_FROM_ONNX
from ...errors import CheckpointError, UnsupportedError
from ...formats import save
from ...storage.paths import PathLike, as_path
from ...storage.staging import current_files, pending_set
from ..artifacts import Artifacts, OptimizerSpec
from ..optimizer import optimizer_spec
from .lowering import lowered
from .step_model import ACCUMULATED, COUNT, State, StepModel, step_model
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
    start = checkpoint if checkpoint is not None else source.state
    unused = _tensors(start, accumulate, source)
    made = step_model(joint, spec, counters, unused=unused, accumulate=accumulate, optimize=optimize)
    state, accumulators = _state(made, spec, start, list(joint.gradients), source)
    place = as_path(folder)
    with pending_set(place, _SET, lambda name: name in (MODEL, STATE), lambda: _refuse_existing(place, overwrite)) as pending:
        onnx.save(made.model, os.fspath(pending.path / MODEL))
        save(state, pending.path / STATE, format="safetensors", single_file=True, accumulators=accumulators)
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


def _tensors(source: CheckpointState, accumulate: int, artifacts: Artifacts) -> dict[str, State]:
    """Element types and shapes of a checkpoint's parameters and buffers, without sums of gradients."""
    if source.nominal:
        raise CheckpointError(
            "the checkpoint is nominal: its parameters have no values", path=artifacts.checkpoint_path, remedy="Complete it first."
        )
    if COUNT in source.frozen and accumulate == 1:
        raise CheckpointError(
            "the checkpoint has sums of gradients that no update has used yet",
            path=artifacts.checkpoint_path,
            field=COUNT,
            remedy="Pass accumulate= as when they were added up.",
        )
    if odd := next((name for name, value in source.parameters.items() if not isinstance(value, torch.Tensor)), None):
        raise UnsupportedError("is not a tensor of numbers", path=artifacts.checkpoint_path, field=odd)
    return {
        name: (ONNX_FROM_TORCH[value.dtype], tuple(value.shape))
        for name, value in source.parameters.items()
        if name != COUNT and not (name.endswith(ACCUMULATED) and COUNT in source.frozen)
    }


def _state(
    made: StepModel, spec: OptimizerSpec, source: CheckpointState, trained: list[str], artifacts: Artifacts
) -> tuple[CheckpointState, dict[str, torch.Tensor]]:
    """The checkpoint with every state that the graph takes, and the sums of gradients; what it does not have yet starts at zero."""
    if missing := sorted(set(trained) - source.parameters.keys()):
        raise CheckpointError(f"has no {', '.join(missing[:5])}, which the graph trains", path=artifacts.checkpoint_path)
    state = CheckpointState(properties=dict(source.properties))
    group = _one_group(source, spec)
    moments = {f"{name}.{kind}": (name, kind) for name in trained for kind in moments_of(spec)}
    sums = {COUNT, *(f"{name}{ACCUMULATED}" for name in trained)}
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in trained}
    accumulators: dict[str, torch.Tensor] = {}
    for name, (kind, shape) in made.states.items():
        owner, moment = moments.get(name, ("", ""))
        found = group.states.get(owner, {}).get(moment) if owner else source.parameters.get(name)
        if isinstance(found, torch.Tensor) and tuple(found.shape) != shape:
            raise CheckpointError(
                f"has shape {tuple(found.shape)} in the checkpoint and {shape} in the graph", path=artifacts.checkpoint_path, field=name
            )
        value = found.to(TORCH_FROM_ONNX[kind]) if isinstance(found, torch.Tensor) else torch.zeros(shape, dtype=TORCH_FROM_ONNX[kind])
        if owner:
            states[owner][moment] = value
        elif name in sums:
            accumulators[name] = value
        else:
            (state.trainable if name in trained else state.frozen)[name] = value
    hyperparameters = {**spec.hyperparameters, **spec.beyond_torch}
    state.optimizer["group0"] = OptimizerGroup(group.step, group.initial_lr, group.lr, states, hyperparameters)
    return state, accumulators


def _one_group(source: CheckpointState, spec: OptimizerSpec) -> OptimizerGroup:
    """The checkpoint's optimizer state. A step model has one step and one rate for all parameters."""
    groups = list(source.optimizer.values())
    if not groups:
        return OptimizerGroup(0, DEFAULT_LR, None)
    first = groups[0]
    steps = {int(entry["step"]) if "step" in entry else group.step for group in groups for entry in group.states.values()} or {first.step}
    if len(steps) > 1 or len({group.lr for group in groups}) > 1:
        raise UnsupportedError(
            "the checkpoint's parameters have several steps or learning rates: a step model has one of each",
            field="optimizer",
            remedy="Pass a checkpoint with one optimizer group.",
        )
    states = {name: entry for group in groups for name, entry in group.states.items()}
    kinds = {kind for entry in states.values() for kind in entry if kind != "step"}
    (step,) = steps
    if step and kinds and kinds != set(moments_of(spec)):
        raise CheckpointError(
            f"the checkpoint has the moments of another optimizer ({', '.join(sorted(kinds))})",
            field="optimizer",
            remedy="Pass optimizer= as it was trained, or a checkpoint without optimizer state.",
        )
    return dataclasses.replace(first, step=step, states=states)


def _refuse_existing(folder: os.PathLike[str], overwrite: bool) -> None:
    found = [] if overwrite else [name for name in (MODEL, STATE) if name in current_files(as_path(folder), _SET)]
    if found:
        raise CheckpointError(
            f"already holds a step model ({', '.join(found)})",
            path=folder,
            remedy="Pass overwrite=True (--overwrite) to replace it, or choose another folder.",
        )
