"""The state of an `OrtOptimizer` as a checkpoint holds it, and back; and the optimizer of PyTorch that continues from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.state import DEFAULT_LR, OptimizerGroup
from ..engines.ort.memory import zeros_like_all
from ..errors import CheckpointError, UnsupportedError
from ..graphs.artifacts import OptimizerSpec
from .optimizer_state import MOMENTS, check_counts, check_options, count_tensor, share_steps

if TYPE_CHECKING:
    from .optimizer import OrtOptimizer

HYPERPARAMETERS = ("betas", "eps", "weight_decay")
"""Attributes of AdamW's graph; a parameter group (or a scheduler, like OneCycleLR) may set other values."""


def groups(optimizer: OrtOptimizer) -> dict[str, OptimizerGroup]:
    """The optimizer's state as a checkpoint holds it, on the same memory (SGD's moments are zeros, as ORT writes them)."""
    result = {}
    keys = MOMENTS[optimizer.spec.kind] or ("momentum_buffer",)
    for index, group in enumerate(optimizer.param_groups):
        found: dict[str, dict[str, Any]] = {}
        counts: dict[str, int] = {}
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            state = optimizer.state.get(parameter) or {}
            counts[name] = int(state["step"].item()) if state else 0
            found[name] = {
                f"momentum{number}": state[key] if key in state else torch.zeros_like(parameter.detach()) for number, key in enumerate(keys)
            }
        step = max(counts.values(), default=0)
        if optimizer.spec.kind != "SGD":
            for name, count in counts.items():
                if count != step:
                    found[name]["step"] = torch.tensor(count)
        initial = float(group.get("initial_lr", DEFAULT_LR))
        result[f"group{index}"] = OptimizerGroup(step, initial, float(group["lr"]), found, _saved_hyperparameters(group, optimizer.spec))
    return result


@torch.no_grad()
def load_groups(optimizer: OrtOptimizer, groups: Mapping[str, OptimizerGroup]) -> None:
    """Load moments, steps and (if known) the rate of a checkpoint. Everything is checked before anything changes.

    Parameters that the checkpoint has no moments for start from zero; if it has none at all, only the step is loaded, as ORT
    does.
    """
    loaded = []
    for index, own in enumerate(optimizer.param_groups):
        parameters = dict(zip(own["param_names"], own["params"], strict=True))
        source = source_group(groups, list(parameters), index)
        if source is None:
            continue
        check_options(source.hyperparameters, optimizer.spec)
        made = states_from(groups, parameters, optimizer.spec)
        check_counts({int(state["step"].item()): state for state in made.values()}, optimizer.spec, optimizer.fused)
        loaded.append((own, source, parameters, made))
    for own, source, parameters, made in loaded:
        if source.lr is not None:
            own["lr"] = source.lr
        own.update({key: tuple(value) if key == "betas" else value for key, value in source.hyperparameters.items() if key in own})
        share_steps(list(made.values()), optimizer.spec)
        for name, parameter in parameters.items():
            optimizer.state.pop(parameter, None)
            if name in made:
                optimizer.state[parameter] = made[name]
        optimizer._claim([parameters[name] for name in made])


def to_torch(optimizer: OrtOptimizer) -> torch.optim.Optimizer:
    """A plain `torch.optim.AdamW` or `SGD` that continues from this state, if PyTorch has the same mathematics."""
    spec = optimizer.spec
    if not spec.known:
        raise UnsupportedError("the hyper-parameters of a .ort optimizer graph can't be read", remedy="Keep optimizer_model.onnx.")
    if spec.max_norm is not None:
        raise UnsupportedError(
            "the graph clips gradients, torch.optim does not",
            remedy="Export without clipping, and clip with torch.nn.utils.clip_grad_norm_.",
        )
    if spec.kind == "AdamW" and (spec.adam_mode == 1 or not spec.correct_bias):
        raise UnsupportedError(
            f"adam_mode={spec.adam_mode}, correct_bias={spec.correct_bias}: torch.optim.AdamW applies epsilon and decay differently",
            remedy="Use OrtOptimizer(fused=True), or export with adam_mode=0.",
        )
    groups = [{key: value for key, value in group.items() if key not in ("foreach", "fused")} for group in optimizer.param_groups]
    kind: Any = torch.optim.SGD if spec.kind == "SGD" else torch.optim.AdamW
    plain: torch.optim.Optimizer = kind(groups, lr=optimizer.param_groups[0]["lr"])
    plain.load_state_dict(optimizer.state_dict())
    return plain


def _saved_hyperparameters(group: dict[str, Any], spec: OptimizerSpec) -> dict[str, Any]:
    """By PyTorch's names, plus what PyTorch has no name for if it differs from `torch.optim`."""
    own = () if spec.kind == "SGD" else HYPERPARAMETERS
    return {key: list(group[key]) if key == "betas" else group[key] for key in own if key in group} | spec.beyond_torch


def states_from(
    groups: Mapping[str, OptimizerGroup], parameters: Mapping[str, torch.Tensor], spec: OptimizerSpec
) -> dict[str, dict[str, Any]]:
    """The states of the parameters that a checkpoint has moments for. If it has none at all, zeros at its step, as in ORT."""
    saved = {name: (group.step, states) for group in groups.values() for name, states in group.states.items() if states}
    members = [name for name in parameters if name in saved]
    if not saved and (step := max((group.step for group in groups.values()), default=0)):
        made = {name: {"step": count_tensor(step)} for name in parameters}
        for key in MOMENTS[spec.kind]:
            for name, place in zip(made, zeros_like_all(list(parameters.values())), strict=True):
                made[name][key] = place
        return made
    made = {name: {"step": count_tensor(saved[name][1].get("step", saved[name][0]))} for name in members}
    if spec.kind == "SGD" and (odd := [name for name in members if "momentum1" in saved[name][1]]):
        raise CheckpointError("the moments are from another kind of optimizer, the graph runs SGD", field=odd[0], remedy=_WEIGHTS_ONLY)
    for number, key in enumerate(MOMENTS[spec.kind]):
        for name, place in zip(members, zeros_like_all([parameters[name] for name in members]), strict=True):
            moment = saved[name][1].get(f"momentum{number}")
            if moment is None or moment.shape != place.shape:
                raise CheckpointError("no moment of the parameter's shape", field=f"{name}/momentum{number}", remedy=_WEIGHTS_ONLY)
            made[name][key] = place.copy_(moment.detach())
    return made


_WEIGHTS_ONLY = "Load weights only: leave the optimizer out of load_checkpoint."


def source_group(groups: Mapping[str, OptimizerGroup], members: Sequence[str], index: int) -> OptimizerGroup | None:
    """The checkpoint's group that a parameter group continues: the one its members are in."""
    owner = {name: key for key, group in groups.items() for name in group.states}
    found = sorted({owner[name] for name in members if name in owner})
    if not found:
        return groups.get(f"group{index}")
    first = groups[found[0]]
    for key in found[1:]:
        if (groups[key].lr, groups[key].hyperparameters) != (first.lr, first.hyperparameters):
            raise UnsupportedError(
                f"parameter group {index} of the optimizer mixes the checkpoint's groups {', '.join(found)}, which have different rates or "
                "hyper-parameters",
                field="param_groups",
                remedy="Give the optimizer the same groups (params=).",
            )
    return first
