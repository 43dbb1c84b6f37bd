"""The submodules of an `OrtModule`: they hold parameters by name and compute nothing, since the graph runs as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod

from ..errors import CheckpointError
from ..storage.files import warn

_VALUE_HOOKS = ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm")
_NEVER_CALLED = (
    "hooks on the submodules of an OrtModule are never called: the graph runs as a whole. "
    "Register it on the OrtModule itself, or on a parameter (parameter.register_hook)."
)


class Scope(nn.Module):
    """Holds the parameters whose names share a prefix, so that `model.fc1.weight` works."""

    def __init__(self, hooked: list[Scope]) -> None:
        super().__init__()
        self._hooked = hooked
        """Scopes with hooks that compute parameters, the same list for all scopes of a module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not set_own_attribute(self, name, value):
            super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return "\n".join(tensor_lines(self))

    def forward(self, run: Callable[[], Any]) -> Any:
        """FSDP2 gathers a module's parameters before its forward and frees them after it: the graph runs in between."""
        return run()

    def register_forward_pre_hook(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        if computes_values(hook):
            if self not in self._hooked:
                self._hooked.append(self)
        elif not _is_sharding(hook):
            warn(_NEVER_CALLED)
        return super().register_forward_pre_hook(hook, *args, **kwargs)

    def register_forward_hook(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_sharding(hook):
            warn(_NEVER_CALLED)
        return super().register_forward_hook(hook, *args, **kwargs)

    def register_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        warn(_NEVER_CALLED)
        return super().register_backward_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        warn(_NEVER_CALLED)
        return super().register_full_backward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        warn(_NEVER_CALLED)
        return super().register_full_backward_pre_hook(*args, **kwargs)


def _is_sharding(hook: Any) -> bool:
    """Whether it is one of FSDP2's own hooks, for which a sharded submodule's forward is called after all."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def computes_values(hook: Any) -> bool:
    """Whether a forward pre-hook sets a parameter's value and ignores its inputs: pruning, and the older weight and spectral norm."""
    return isinstance(hook, BasePruningMethod) or type(hook).__module__ in _VALUE_HOOKS


def compute_values(modules: Iterable[nn.Module]) -> None:
    """Run the forward pre-hooks of these modules, whose forward is never called."""
    for module in modules:
        for hook in list(module._forward_pre_hooks.values()):
            if computes_values(hook):
                hook(module, ())


def refresh_values(modules: Iterable[nn.Module]) -> None:
    """The same between two steps: a spectral norm runs its power iteration only in a forward."""
    for module in modules:
        before, module.training = module.training, False
        try:
            compute_values([module])
        finally:
            module.training = before


def place(root: nn.Module, name: str, hooked: list[Scope]) -> tuple[nn.Module, str]:
    """Walks dotted names through scopes. Bypasses `register_parameter`, which refuses names that ORT allows."""
    *path, key = name.split(".")
    owner = root
    for part in path:
        if part not in owner._modules:
            owner._modules[part] = Scope(hooked)
        owner = owner._modules[part]  # type: ignore[assignment]
    return owner, key


def materialize(
    name: str, value: torch.Tensor, specs: Mapping[str, Any], nominal: bool, device: torch.device, slot: torch.Tensor | None
) -> torch.Tensor:
    """A new tensor with a checkpoint's value, in `slot` if given; zeros for a nominal checkpoint."""
    if slot is not None:
        return slot if nominal else slot.copy_(value.detach())
    if not nominal:
        return value.detach().clone(memory_format=torch.contiguous_format).to(device)
    shape = specs[name].shape if name in specs else ()
    return torch.zeros(shape, dtype=value.dtype, device=device)


def tree_order(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """The names of all parameters and buffers in `state_dict` order: a module's own before those of its submodules."""
    yield from (prefix + key for key in (*module._parameters, *module._buffers))
    for name, part in module._modules.items():
        if part is not None:
            yield from tree_order(part, f"{prefix}{name}.")


def lookup(owner: nn.Module, key: str, computed: list[str] | None = None) -> torch.Tensor:
    """A parameter, a buffer, or the value that a parametrization or hook computes for it (its name is then added to `computed`)."""
    value: Any = owner._parameters.get(key)
    if value is None:
        value = owner._buffers.get(key)
    if value is None:
        value = getattr(owner, key, None)
        if computed is not None:
            computed.append(key)
    if not isinstance(value, torch.Tensor):
        raise CheckpointError("no longer a tensor", field=key)
    return value


def is_computed(owner: nn.Module, key: str) -> bool:
    return key not in owner._parameters and key not in owner._buffers


def set_own_attribute(module: nn.Module, name: str, value: Any) -> bool:
    """Set an attribute that the module has, though a parameter, buffer or scope may have the same name; False for all others.

    `nn.Module` would refuse `module.training = False` where a parameter is called `training`. The attribute and the parameter then exist
    side by side: `module.training` is the attribute, the parameter is in `state_dict()` and `named_parameters()`.
    """
    own = module.__dict__
    if name not in own:
        return False
    if not isinstance(value, (torch.Tensor, nn.Module)):
        object.__setattr__(module, name, value)
        return True
    for kind in ("_parameters", "_buffers", "_modules"):
        if name in own[kind]:  # load_state_dict(assign=True) means the parameter
            own[kind][name] = value
            return True
    return False


def tensor_lines(module: nn.Module) -> list[str]:
    """A line for each tensor that the module itself holds: type, shape, and whether it is trained."""

    def line(name: str, value: torch.Tensor, role: str) -> str:
        return f"{name}: {str(value.dtype).removeprefix('torch.')} {list(value.shape)}, {role}"

    parameters = module.named_parameters(recurse=False)
    lines = [line(name, value, "trained" if value.requires_grad else "frozen") for name, value in parameters]
    return lines + [line(name, value, "buffer") for name, value in module.named_buffers(recurse=False)]
