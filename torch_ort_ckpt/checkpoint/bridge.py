"""`CheckpointState` <-> PyTorch: module state dicts and `torch.optim` state dicts, in pairs. Nothing is copied; results alias their source.

| ORT | PyTorch |
|---|---|
| `momentum0`, `momentum1` | `exp_avg`, `exp_avg_sq` (Adam family), `momentum_buffer` (SGD) |
| one step per group | one `step` tensor per parameter |
| trainable / frozen | `requires_grad` / buffers and the rest |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import CheckpointError, UnsupportedError
from ..storage.files import warn
from ..storage.tensors import memory_key
from .names import NameMap, of_module, plain_name, transposed
from .state import DEFAULT_LR, CheckpointState, OptimizerGroup, OptimizerSpec, Value, alias_name, is_string
from .training_graph import GraphOptimizer, TrainingGraph, unwrap

TO_TORCH_MOMENTS = {"adam": {"momentum0": "exp_avg", "momentum1": "exp_avg_sq"}, "sgd": {"momentum0": "momentum_buffer"}}
TO_ORT_MOMENTS = {"exp_avg": "momentum0", "exp_avg_sq": "momentum1", "momentum_buffer": "momentum0"}


def to_state_dict(
    state: CheckpointState,
    names: NameMap | None = None,
    include_mixed_precision: bool = False,
    dtype: torch.dtype | None = None,
    *,
    upcast_half: bool = False,
    module: nn.Module | None = None,
) -> dict[str, torch.Tensor]:
    """The parameters as `nn.Module.load_state_dict` takes them.

    `module` keeps what that module has: a checkpoint may hold frozen tensors, constants of the graph, that PyTorch's module does not.
    A weight of the checkpoint that was trained is never left out.
    `dtype` converts floating-point tensors (using a weight's own half-precision alias where it fits). `upcast_half` turns weights that
    exist only as `<w>_fp16` into fp32 `<w>`, with a warning that names them. String tensors are skipped with a warning that names them.
    """
    state.require_values()
    names = names or NameMap.identity()
    if upcast_half:
        state = CheckpointState(dict(state.trainable), dict(state.frozen), mixed_precision=dict(state.mixed_precision))
        if promoted := state.promote_half():
            warn(f"upcast from half precision, no full-precision master exists: {', '.join(sorted(promoted))}")
    if strings := [name for name, value in state.parameters.items() if is_string(value)]:
        warn(f"string tensors can't be in a state dict and are left out: {', '.join(sorted(strings))}")
    chosen = {name: weight_as(state, name, value, dtype) for name, value in state.parameters.items() if name not in strings}
    result = names.to_torch(chosen)
    if include_mixed_precision:
        for name, alias in names.to_torch(state.mixed_precision).items():
            result[alias_name(name, alias)] = alias
    return result if module is None else of_module(result, module, {name for ort in state.trainable for name, _ in names.targets(ort)})


def weight_as(state: CheckpointState, name: str, value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A weight in another precision if it is floating-point; its own half-precision alias if that has the requested type."""
    if dtype is None or not value.is_floating_point() or value.dtype == dtype:
        return value
    alias = state.mixed_precision.get(name)
    return alias if alias is not None and alias.dtype == dtype else value.to(dtype)


class HasOptimizerSpec(Protocol):
    """The part of `Artifacts` that is used here."""

    @property
    def optimizer_spec(self) -> OptimizerSpec: ...


def to_optimizer_state_dict(
    state: CheckpointState,
    optimizer_or_module: Optimizer | nn.Module,
    names: NameMap | None = None,
    *,
    module: nn.Module | None = None,
    artifacts: HasOptimizerSpec | None = None,
) -> dict[str, Any]:
    """A state dict for `optimizer.load_state_dict`.

    Pass the optimizer (its groups are filled; `module=` names its parameters unless it was built from `named_parameters()` or already
    holds the state's values) or just the module (one group with `param_names`, AdamW or SGD depending on the moments).

    Hyper-parameters of the state override the optimizer's, as in PyTorch. ORT's own files have none: they come from the optimizer
    graph of `artifacts` (an `OrtModule` brings its own), and without it a warning names those of the optimizer that ORT's default differs
    from. What `torch.optim` does not support (`adam_mode=1`) is a warning too.
    """
    spec = artifacts.optimizer_spec if artifacts is not None else _spec_of(module, optimizer_or_module)
    if isinstance(optimizer_or_module, Optimizer):
        groups = _named_groups(optimizer_or_module, module, state, names)
        kind = "sgd" if all("nesterov" in group for group in optimizer_or_module.param_groups) else "adam"
        defaults = [{key: value for key, value in group.items() if key != "params"} for group in optimizer_or_module.param_groups]
    else:
        groups = [[name for name, parameter in optimizer_or_module.named_parameters() if parameter.requires_grad]]
        adam = any("momentum1" in states for group in state.optimizer.values() for states in group.states.values())
        kind = "adam" if adam or (spec is not None and spec.kind == "AdamW") else "sgd"
        template = torch.optim.AdamW if kind == "adam" else torch.optim.SGD
        defaults = [{key: value for key, value in template([torch.empty(0)]).param_groups[0].items() if key != "params"}]
        defaults[0]["param_names"] = groups[0]
    target = optimizer_or_module if isinstance(optimizer_or_module, Optimizer) else None
    names = names or NameMap.identity()
    owner = {param: (group_name, group) for group_name, group in state.optimizer.items() for param in group.states}
    sources = _matching_groups(state, groups, names, owner)
    _check_kind(
        [owner[ort][1].states[ort] for members in groups for name in members if (ort := names.ort_name(name)) in owner], kind, target
    )
    if spec is not None and (spec.kind == "SGD") != (kind == "sgd"):
        raise _other_kind(spec.kind, target, kind)
    states: dict[int, dict[str, Any]] = {}
    param_groups, index = [], 0
    for members, own, source in zip(groups, defaults, sources, strict=True):
        graph = {key: value for key, value in spec.hyperparameters.items() if key in own} if spec is not None and spec.known else {}
        filled = {**own, **graph, **_hyperparameters(source, own)}
        param_groups.append({**filled, "params": list(range(index, index + len(members)))})
        for name in members:
            ort = names.ort_name(name)
            if ort in owner:
                entry = _torch_moments(owner[ort][1], ort, kind, filled, counts=not isinstance(target, torch.optim.SGD | None))
                turned = name in names.entries and names.entries[name].transpose
                states[index] = {key: transposed(v, name) if turned and v.ndim == 2 else v for key, v in entry.items()}
            index += 1
    known = {names.ort_name(name) for members in groups for name in members}
    if lost := sorted(set(owner) - known):
        warn(f"the optimizer has no parameter for the moments of: {', '.join(lost[:5])}{' ...' if len(lost) > 5 else ''}")
    if not isinstance(target, GraphOptimizer):  # which runs the graph itself
        _warn_of_differences(param_groups, sources, spec)
    return {"state": {number: entry for number, entry in states.items() if entry}, "param_groups": param_groups}


def _spec_of(*candidates: object) -> OptimizerSpec | None:
    """Of the optimizer graph that an `OrtModule` was made with."""
    modules = [unwrap(candidate) for candidate in candidates if isinstance(candidate, nn.Module)]
    return next((module.optimizer_spec for module in modules if isinstance(module, TrainingGraph)), None)


def _check_kind(members: list[dict[str, Value]], kind: str, optimizer: Optimizer | None) -> None:
    """Raise for moments of another optimizer: Adam has two, SGD at most one."""
    pairs = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam))
    for moments in members:
        if kind == "sgd" and "momentum1" in moments:
            raise _other_kind("AdamW", optimizer, kind)
        if pairs and "momentum0" in moments and "momentum1" not in moments:
            raise _other_kind("SGD", optimizer, kind)


def _other_kind(theirs: str, optimizer: Optimizer | None, kind: str) -> UnsupportedError:
    own = type(optimizer).__name__ if optimizer is not None else {"sgd": "SGD", "adam": "AdamW"}[kind]
    return UnsupportedError(
        f"the optimizer state belongs to {theirs}, the optimizer is {own}",
        field="optimizer",
        remedy=f"Use torch.optim.{theirs}, or load the weights alone: toc.to_state_dict(state).",
    )


def _warn_of_differences(param_groups: list[dict[str, Any]], sources: list[OptimizerGroup | None], spec: OptimizerSpec | None) -> None:
    """Warn about what neither the checkpoint nor the artifacts contain, and what `torch.optim` does differently."""
    usual = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}
    unknown = spec is None or not spec.known
    for filled, source in zip(param_groups, sources, strict=True):
        moments = source is not None and any("momentum1" in states for states in source.states.values())
        hyperparameters = source.hyperparameters if source is not None else {}
        odd = [key for key, value in usual.items() if moments and key in filled and key not in hyperparameters and filled[key] != value]
        if unknown and odd:
            warn(
                f"the checkpoint does not say which hyper-parameters it was trained with: {_listed(filled, odd)} of the optimizer stay, "
                f"while ONNX Runtime's optimizer graphs have {_listed(usual, odd)} unless exported with others. Pass "
                "artifacts=toc.Artifacts.load(folder), or give the optimizer the graph's values."
            )
            break
    graph = {} if spec is None else spec.beyond_torch
    beyond = {**graph, **{k: v for source in sources if source for k, v in source.hyperparameters.items() if k in _BEYOND_TORCH}}
    if beyond:
        warn(
            f"the optimizer graph has {_listed(beyond, list(beyond))}, which torch.optim does not: the next steps will differ from ONNX "
            "Runtime's. OrtOptimizer does the same as the graph; export_artifacts(optimizer=...) makes a graph like torch.optim."
        )


_BEYOND_TORCH = OptimizerSpec("AdamW", adam_mode=1, correct_bias=False, max_norm=0.0).beyond_torch.keys()


def _listed(values: Mapping[str, Any], keys: list[str]) -> str:
    return ", ".join(f"{key}={values[key]}" for key in keys)


def _hyperparameters(group: OptimizerGroup | None, own: Mapping[str, Any]) -> dict[str, Any]:
    if group is None:
        return {}
    found = {key: tuple(value) if isinstance(value, list) else value for key, value in group.hyperparameters.items()}
    found = {key: value for key, value in found.items() if key in own}
    if group.lr is not None:
        found["lr"] = group.lr
        if "initial_lr" in own or group.initial_lr != group.lr:
            found["initial_lr"] = group.initial_lr
    return found


def _torch_moments(
    group: OptimizerGroup, name: str, kind: str, hyperparameters: Mapping[str, Any], *, counts: bool = False
) -> dict[str, Any]:
    moments = dict(group.states[name])
    step = float(moments.pop("step", group.step))
    count = torch.tensor(step, dtype=torch.float32 if abs(step) < 1 << 24 else torch.float64)  # float32 is exact up to there
    if kind == "sgd":
        if not hyperparameters.get("momentum"):
            moments.pop("momentum0", None)  # ORT keeps a buffer of zeros even for plain SGD
        found = {TO_TORCH_MOMENTS["sgd"].get(key, key): value for key, value in moments.items()}
        return {"step": count, **found} if counts else found  # torch.optim.SGD does not count, OrtOptimizer does
    if not moments:
        return {}
    return {"step": count, **{TO_TORCH_MOMENTS["adam"].get(key, key): value for key, value in moments.items()}}


def _matching_groups(
    state: CheckpointState, groups: list[list[str]], names: NameMap, owner: Mapping[str, tuple[str, OptimizerGroup]]
) -> list[OptimizerGroup | None]:
    """Which of our groups each torch group takes its hyper-parameters from: the one its parameters are in."""
    result: list[OptimizerGroup | None] = []
    for number, members in enumerate(groups):
        found = {owner[names.ort_name(name)][0] for name in members if names.ort_name(name) in owner}
        if len(found) == 1:
            result.append(state.optimizer[found.pop()])
        elif len(found) > 1:
            raise UnsupportedError(
                f"parameter group {number} of the optimizer mixes the checkpoint's groups {', '.join(sorted(found))}",
                remedy="Give the optimizer the same groups.",
            )
        else:
            result.append(state.optimizer.get(f"group{number}"))
    return result


def _named_groups(optimizer: Optimizer, module: nn.Module | None, state: CheckpointState, names: NameMap | None) -> list[list[str]]:
    """The names of each group's parameters."""
    named = _parameter_names(optimizer, module)
    if named is not None:
        return named
    parameters = {str(n): p for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    found = NameMap.match(CheckpointState(dict(state.trainable)), parameters)
    if found.unmatched_torch:
        raise CheckpointError(
            f"{len(found.unmatched_torch)} of the optimizer's parameters could not be matched to a name",
            field="optimizer",
            remedy="Pass module=, or build the optimizer from module.named_parameters().",
        )
    back = {entry.ort: name for name, entry in (names or NameMap.identity()).entries.items()}
    flat = iter(back.get(found.ort_name(key), found.ort_name(key)) for key in parameters)
    return [[next(flat) for _ in group["params"]] for group in optimizer.param_groups]


def _parameter_names(optimizer: Optimizer, module: nn.Module | None) -> list[list[str]] | None:
    if module is not None:
        by_identity = {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}
        missing = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in by_identity]
        if missing:
            raise CheckpointError(
                f"{len(missing)} of the optimizer's parameters are not the module's",
                field="optimizer",
                remedy="Pass module= the module whose parameters the optimizer has.",
            )
        return [[by_identity[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if all("param_names" in group for group in optimizer.param_groups):
        return [[plain_name(name) for name in group["param_names"]] for group in optimizer.param_groups]
    return None


# From PyTorch


def from_torch(
    module_or_state_dict: nn.Module | Mapping[str, Any],
    optimizer: Optimizer | None = None,
    *,
    names: NameMap | None = None,
    properties: Mapping[str, int | float | str] | None = None,
    like: CheckpointState | None = None,
) -> CheckpointState:
    """A state that aliases the module's (or state dict's) tensors and the optimizer's moments.

    Of a module, parameters with `requires_grad` are trainable, other parameters and buffers frozen. A plain state dict does not say:
    floating-point tensors count as trainable, unless `like` says otherwise. `like`, the state this training came from, also gives the
    names (matched as by `NameMap.match`), the transposes, element types, half-precision aliases, properties and groups to go back to.
    """
    tensors, trainable = _tensors_of(module_or_state_dict, optimizer)
    if names is None:
        names = NameMap.identity() if like is None else NameMap.match(like, tensors)
    if like is not None:
        _check_complete(names.to_ort(tensors), like)
    named = names.to_ort({name: value.detach() for name, value in tensors.items()})
    learnt = {names.ort_name(name) for name in trainable} if like is None else set(like.trainable)
    state = CheckpointState(
        {name: value for name, value in named.items() if name in learnt},
        {name: value for name, value in named.items() if name not in learnt},
        properties=dict(properties or {}),
    )
    if optimizer is not None:
        state.optimizer = _groups_of(optimizer, module_or_state_dict, names)
    if like is not None:
        _follow(state, like, properties)
    return state


def _tensors_of(source: nn.Module | Mapping[str, Any], optimizer: Optimizer | None) -> tuple[dict[str, torch.Tensor], set[str]]:
    if isinstance(source, nn.Module):
        found = {plain_name(name): value for name, value in source.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
        learnt = {plain_name(name) for name, p in source.named_parameters(remove_duplicate=False) if p.requires_grad}
        return found, learnt
    if bad := [name for name, value in source.items() if not isinstance(value, torch.Tensor)]:
        raise CheckpointError(
            f"not a state dict of tensors: {bad[0]!r} is a {type(source[bad[0]]).__name__}",
            field=str(bad[0]),
            remedy="Pass a module, or the dict that its state_dict() returns.",
        )
    found = {plain_name(name): value for name, value in source.items()}
    if optimizer is not None:
        held = {memory_key(p) for group in optimizer.param_groups for p in group["params"]}
        learnt = {name for name, value in found.items() if memory_key(value) in held}
        if learnt:
            return found, learnt
    return found, {name for name, value in found.items() if value.is_floating_point()}


def _groups_of(optimizer: Optimizer, source: nn.Module | Mapping[str, Any], names: NameMap) -> dict[str, OptimizerGroup]:
    named = _parameter_names(optimizer, source if isinstance(source, nn.Module) else None)
    if named is None:
        by_memory = {memory_key(value): plain_name(name) for name, value in source.items()} if isinstance(source, Mapping) else {}
        missing = [p for group in optimizer.param_groups for p in group["params"] if memory_key(p) not in by_memory]
        if missing:
            raise CheckpointError(
                f"{len(missing)} of the optimizer's parameters are not in the state dict",
                remedy="Pass the module instead of its state dict.",
            )
        named = [[by_memory[memory_key(p)] for p in group["params"]] for group in optimizer.param_groups]
    groups = {}
    for number, (group, members) in enumerate(zip(optimizer.param_groups, named, strict=True)):
        states = {name: optimizer.state.get(parameter, {}) for parameter, name in zip(group["params"], members, strict=True)}
        found = group_from_torch(group, states)
        turned = {name for name in members if name in names.entries and names.entries[name].transpose}
        found.states = {
            names.ort_name(name): {k: transposed(v, name) if name in turned and v.ndim == 2 else v for k, v in moments.items()}
            for name, moments in found.states.items()
        }
        groups[f"group{number}"] = found
    return groups


def group_from_torch(group: Mapping[str, Any], members: Mapping[str, Mapping[str, Any]]) -> OptimizerGroup:
    """One of `param_groups`, with the state of each of its parameters by name."""
    rate = float(group["lr"])
    result = OptimizerGroup(initial_lr=float(group.get("initial_lr", rate)), lr=rate)
    skipped = ("params", "param_names", "lr", "initial_lr")
    result.hyperparameters = {key: _plain(value) for key, value in group.items() if key not in skipped}
    steps: dict[str, int] = {}
    for name, states in members.items():
        moments: dict[str, Value] = {}
        for key, value in states.items():
            if key == "step":
                steps[name] = int(value)
            elif value is not None:
                moments[TO_ORT_MOMENTS.get(key, key)] = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
        result.states[name] = moments
    result.step = max(steps.values(), default=0)
    for name, step in steps.items():
        if step != result.step:
            result.states[name]["step"] = torch.tensor(step)
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _check_complete(found: Mapping[str, Value], like: CheckpointState) -> None:
    wanted = {name: value for name, value in like.parameters.items() if not is_string(value)}
    if missing := sorted(wanted.keys() - found.keys()):
        raise CheckpointError(
            f"nothing found for {len(missing)} weights of `like`: {', '.join(missing[:5])}",
            field=missing[0],
            remedy="Pass names= to map them.",
        )
    for name, value in wanted.items():
        if not (like.nominal or found[name].shape == value.shape):
            raise CheckpointError(
                f"shape {tuple(found[name].shape)}, but `like` has {tuple(value.shape)}",
                field=name,
                remedy="Pass as like= a checkpoint of the same model, or leave it out.",
            )


def _follow(state: CheckpointState, like: CheckpointState, properties: Mapping[str, int | float | str] | None) -> None:
    """Element types, aliases, string tensors, properties and partitions as in `like`."""
    for home, model in ((state.trainable, like.trainable), (state.frozen, like.frozen)):
        for name, value in model.items():
            home[name] = value if is_string(value) else home[name].to(value.dtype)
    state.mixed_precision = {name: state.parameters[name].to(alias.dtype) for name, alias in like.mixed_precision.items()}
    state.partitions = dict(like.partitions)
    if properties is None:
        state.properties = dict(like.properties)
    for name, group in state.optimizer.items():
        source = like.optimizer.get(name)
        if source is not None and source.initial_lr != DEFAULT_LR and "initial_lr" not in group.hyperparameters:
            group.initial_lr = source.initial_lr
        if source is not None and not group.step:  # SGD does not count its steps
            group.step = source.step
