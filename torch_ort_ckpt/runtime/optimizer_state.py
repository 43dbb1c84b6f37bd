"""State that `OrtOptimizer` loads: state dicts matched by parameter name, options of the graph, step counts per parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from operator import attrgetter, itemgetter
from operator import is_ as _is
from typing import Any

import torch

from ..checkpoint.names import plain_name
from ..checkpoint.state import OptimizerGroup
from ..engines.updates import Update
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


# What a step reads: lists of the same length, without a Python loop per tensor (a model may have hundreds).

_is_none, _grad, _step_of = partial(_is, None), attrgetter("grad"), itemgetter("step")
_MOMENTS_OF = {kind: [itemgetter(name) for name in names] for kind, names in MOMENTS.items()}


def with_gradients(parameters: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[Any]]:
    """The parameters that have gradients, and these."""
    gradients: list[Any] = list(map(_grad, parameters))
    if not any(map(_is_none, gradients)):
        return parameters, gradients
    kept = [parameter for parameter in parameters if parameter.grad is not None]
    return kept, [gradient for gradient in gradients if gradient is not None]


def at_one_step(states: Sequence[dict[str, Any]]) -> bool:
    """Whether all states share one step tensor."""
    return all(map(_is, map(_step_of, states), repeat(states[0]["step"])))


def update_of(
    parameters: list[torch.Tensor], gradients: list[torch.Tensor], states: list[dict[str, Any]], *, lr: float, spec: OptimizerSpec
) -> tuple[Update, torch.Tensor]:
    """The next update of parameters that are at the same count, and the tensor that counts."""
    step: torch.Tensor = states[0]["step"]
    first, second = [list(map(get, states)) for get in _MOMENTS_OF[spec.kind]] or [[], []]
    return Update(parameters, gradients, first, second, step=int(step.item()) + 1, lr=lr, hyperparameters=spec), step


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
