"""State that `OrtOptimizer` loads: state dicts matched by parameter name, options of the graph, step counts per parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..checkpoint.names import plain_name
from ..checkpoint.state import OptimizerGroup
from ..engines.ort.memory import zeros_like_all
from ..errors import CheckpointError, UnsupportedError
from ..graphs.artifacts import OptimizerSpec
from ..storage.files import warn

MOMENTS = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ()}
"""PyTorch's names of the moments that the update reads and writes."""

_SWITCHES = {"AdamW": ("amsgrad", "maximize"), "SGD": ("momentum", "weight_decay", "nesterov", "maximize")}
"""Options of PyTorch's optimizers that the graphs do not have."""

_NAMES_REMEDY = (
    "Create the optimizer from model.named_parameters() before saving its state, "
    'or add the names in its order: state_dict["param_groups"][i]["param_names"] = [...].'
)


def in_own_order(content: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], spec: OptimizerSpec, graph: list[str]) -> dict[str, Any]:
    """The state dict with its parameters in the order of `groups`, checked by their names, or by their shapes if it has none.

    `graph` is the order that `OrtOptimizer` had in release 0.1.0, whose state dicts have no names.
    """
    if not all(isinstance(content.get(key), kind) for key, kind in (("state", Mapping), ("param_groups", list))):
        raise CheckpointError("not the state dict of an optimizer", remedy="Pass what optimizer.state_dict() returns.")
    saved: list[dict[str, Any]] = content["param_groups"]
    if len(saved) != len(groups):
        raise CheckpointError(
            f"the state dict has {len(saved)} parameter groups, this optimizer has {len(groups)}",
            field="param_groups",
            remedy="Give the optimizer the same groups.",
        )
    result = []
    for number, (theirs, own) in enumerate(zip(saved, groups, strict=True)):
        check_options(theirs, spec)
        named = "param_names" in theirs
        chosen = _by_name(theirs, own, number, content["state"]) if named else _by_position(theirs, own, number, graph)
        for index, name, parameter in zip(chosen, own["param_names"], own["params"], strict=True):
            _check_moments(content["state"].get(index) or {}, name, parameter, spec)
        result.append({**theirs, "params": chosen, "param_names": list(own["param_names"])})
    kept = {index for group in result for index in group["params"]}
    return {**content, "state": {index: state for index, state in content["state"].items() if index in kept}, "param_groups": result}


def _by_name(theirs: Mapping[str, Any], own: Mapping[str, Any], number: int, states: Mapping[Any, Any]) -> list[Any]:
    wanted = own["param_names"]
    names = [name if name in wanted else plain_name(name) for name in theirs["param_names"]]
    if len(names) != len(theirs["params"]) or len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(
            f"group {number} has {len(theirs['params'])} parameters and the names {', '.join(repeated[:5] or names[:5])}"
            f"{' more than once' if repeated else ''}",
            field="param_names",
            remedy="Every parameter needs one name of its own.",
        )
    indices = dict(zip(names, theirs["params"], strict=True))
    missing = [name for name in wanted if name not in indices]
    unknown = [name for name in names if name not in wanted and states.get(indices[name])]
    if missing or unknown:
        raise CheckpointError(
            f"group {number} of the state dict is for other parameters: missing {missing[:5]}, unknown {unknown[:5]}",
            field="param_names",
            remedy="Give the optimizer the same groups, or rename param_names in the state dict.",
        )
    return [indices[name] for name in wanted]


def _by_position(theirs: Mapping[str, Any], own: Mapping[str, Any], number: int, graph: list[str]) -> list[Any]:
    if len(theirs["params"]) != len(own["params"]):
        raise CheckpointError(
            f"group {number} of the state dict has {len(theirs['params'])} parameters without names, this optimizer's has "
            f"{len(own['params'])}",
            field="param_groups",
            remedy=_NAMES_REMEDY,
        )
    members = set(own["param_names"])
    if "foreach" not in theirs and [name for name in graph if name in members] != own["param_names"]:  # torch.optim always has "foreach"
        raise CheckpointError(
            "the state dict has no param_names: it is from an OrtOptimizer of an earlier release, whose parameters were in another order",
            field="param_groups",
            remedy=f'Set state_dict["param_groups"][{number}]["param_names"] to model.artifacts.trainable, or to the order you gave.',
        )
    return list(theirs["params"])


def _check_moments(state: Mapping[str, Any], name: str, parameter: torch.Tensor, spec: OptimizerSpec) -> None:
    if state and (missing := [key for key in (*MOMENTS[spec.kind], "step") if key not in state and spec.kind != "SGD"]):
        raise CheckpointError(f"the state has no {missing[0]}", field=name, remedy="It is from another kind of optimizer.")
    for key, value in state.items():
        if key != "step" and isinstance(value, torch.Tensor) and value.shape != parameter.shape:
            raise CheckpointError(
                f"{key} is {list(value.shape)}, the parameter is {list(parameter.shape)}: the state dict, if it has no param_names, is "
                "in another order",
                field=name,
                remedy=_NAMES_REMEDY,
            )


def torch_defaults(spec: OptimizerSpec) -> dict[str, Any]:
    """The keys of a torch.optim parameter group of this kind, so that states are interchangeable."""
    if spec.kind == "SGD":
        return {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
    return {
        "betas": spec.betas,
        "eps": spec.eps,
        "weight_decay": spec.weight_decay,
        "amsgrad": False,
        "maximize": False,
        "decoupled_weight_decay": True,
    }


@dataclass
class SavedMoments:
    """A checkpoint's moments until optimizers take them, and which optimizer (by key) has the moments of which parameter."""

    groups: dict[str, OptimizerGroup]
    owners: dict[str, str] = field(default_factory=dict)

    def claim(self, names: Sequence[str], optimizer: str) -> list[str]:
        """Register the optimizer as owner of these parameters' moments; returns those that another one had before."""
        claimed = set(names)
        elsewhere = [name for name in names if self.owners.get(name, optimizer) != optimizer]
        self.owners.update(dict.fromkeys(names, optimizer))
        self.groups = {
            key: replace(group, states={name: states for name, states in group.states.items() if name not in claimed})
            for key, group in self.groups.items()
            if not claimed.issuperset(group.states)
        }
        return elsewhere


def warn_of_zeros(names: Sequence[str]) -> None:
    warn(
        f"this OrtOptimizer starts the moments of {len(names)} parameters ({', '.join(names[:3])}{' ...' if len(names) > 3 else ''}) from "
        "zero; another optimizer of this model has moments for them. To continue from those, call load_state_dict(other.state_dict()), or "
        "model.load_checkpoint(state, optimizer), before the first step."
    )


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


def check_options(group: Mapping[str, Any], spec: OptimizerSpec) -> None:
    """Raise for options of `torch.optim` that the graph does not support: they would be ignored."""
    found = [key for key in _SWITCHES[spec.kind] if group.get(key)]
    if spec.kind == "AdamW" and group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
        found.append("decoupled_weight_decay")
    if found:
        raise UnsupportedError(
            f"{found[0]}={group[found[0]]}: the optimizer graph ({spec.kind}) has no such option",
            field=found[0],
            remedy="Use the optimizer of torch.optim that has it.",
        )


# Step counts. Parameters at the same count share one tensor: a step then reads and writes a single number.


def count_tensor(count: int | torch.Tensor) -> torch.Tensor:
    """PyTorch counts in float32, which stops at 2**24 steps."""
    return torch.tensor(float(count), dtype=torch.float64)


def share_steps(states: Sequence[dict[str, Any]], spec: OptimizerSpec) -> dict[int, list[int]]:
    """Let states of the same count share one tensor; returns the positions by count. For SGD the count is the group's, as in ORT."""
    tensors = {id(state["step"]): state["step"] for state in states}
    counts = {key: int(torch.as_tensor(value).item()) for key, value in tensors.items()}
    if spec.kind == "SGD":
        counts = dict.fromkeys(counts, max(counts.values(), default=0))
    found: dict[int, list[int]] = {}
    for position, state in enumerate(states):
        found.setdefault(counts[id(state["step"])], []).append(position)
    for count, positions in found.items():
        shared = count_tensor(count)
        for position in positions:
            states[position]["step"] = shared
    return found


def part_steps(states: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> None:
    """`states` are about to be stepped and `others` are not: separate their step tensors."""
    kept = {id(state["step"]) for state in others}
    copies: dict[int, torch.Tensor] = {}
    for state in states:
        step = state["step"]
        if id(step) in kept:
            if id(step) not in copies:
                copies[id(step)] = step.clone()
            state["step"] = copies[id(step)]


def check_counts(counts: Mapping[int, Any], spec: OptimizerSpec, fused: bool) -> None:
    """Raise for different counts if the graph can't run once for each of them."""
    if len(counts) < 2 or fused or (spec.known and spec.max_norm is None):
        return
    why = "clips the gradients of all parameters together" if spec.known else "is a .ort file, which may clip all gradients together"
    raise UnsupportedError(
        f"parameters of one group are at different steps ({min(counts)} to {max(counts)}), as some were frozen for a while; the graph "
        f"{why}, so it supports only one step count for all",
        field="step",
        remedy="Use OrtOptimizer(fused=True), or export the optimizer without max_norm."
        if spec.known
        else "Use optimizer_model.onnx with fused=True.",
    )


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
