"""Every private name of PyTorch that this package uses: why, and what is done where a release does not have it.

Private names come and go. Each is looked up once, when this module is imported, and has a fallback of public names that gives the same
result, at most slower. `tests/test_pytorch_private.py` removes each of `NAMES` in turn. The figures are the time of a step without the
name, relative to one with it, for 300 small parameters on one CPU thread: `python -m benchmarks.private_names`. A name that gains less than
5 % somewhere is not worth having.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

NAMES: list[str] = []
MISSING: list[str] = []
"""The names that were looked up, and those of them that this PyTorch does not have."""

_Tensors = Sequence[torch.Tensor]


def _find(path: str, fallback: Any) -> Any:
    """What `path` names (without the `torch.` before it), or the fallback."""
    NAMES.append(path)
    found: Any = torch
    place = "torch"
    for name in path.split("."):
        place = f"{place}.{name}"
        module = sys.modules.get(place) if place.startswith("torch.optim.") else None  # torch.optim removes the names of its modules
        found = getattr(found, name, module)
        if found is None:
            MISSING.append(path)
            return fallback
    return found


# One kernel call for many tensors: a model has hundreds of parameters, and a call each takes longer than the work (on CPU 1.13 for sums
# when gradients are accumulated, 1.05 for norms when they are clipped; a kernel launch on a GPU costs more than a call here).


def _add_each(tensors: _Tensors, other: Any, alpha: float = 1) -> None:
    for tensor, value in zip(tensors, other if isinstance(other, (list, tuple)) else itertools.repeat(other), strict=False):
        tensor.add_(value, alpha=alpha)


def _multiply_each(tensors: _Tensors, factor: Any) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def _copy_each(tensors: _Tensors, sources: _Tensors) -> None:
    for tensor, source in zip(tensors, sources, strict=True):
        tensor.copy_(source)


def _norm_of_each(tensors: _Tensors) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(tensor) for tensor in tensors]


foreach_add_: Callable[..., Any] = _find("_foreach_add_", _add_each)
foreach_mul_: Callable[..., Any] = _find("_foreach_mul_", _multiply_each)
foreach_copy_: Callable[..., Any] = _find("_foreach_copy_", _copy_each)
foreach_norm: Callable[..., Sequence[torch.Tensor]] = _find("_foreach_norm", _norm_of_each)


def _adamw_each(
    parameters: _Tensors,
    gradients: _Tensors,
    first: _Tensors,
    second: _Tensors,
    maxima: _Tensors,
    steps: _Tensors,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
) -> None:
    """As the kernel: `steps` count the update being made."""
    for parameter, gradient, m, v, step in zip(parameters, gradients, first, second, steps, strict=True):
        count = step.item()
        parameter.mul_(1 - lr * weight_decay)
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        deviation = (v.sqrt() / (1 - beta2**count) ** 0.5).add_(eps)
        parameter.addcdiv_(m, deviation, value=-lr / (1 - beta1**count))


# AdamW in one pass over memory; torch.optim.AdamW(fused=True) is made of it (2.5).
fused_adamw_: Callable[..., Any] = _find("_fused_adamw_", _adamw_each)

# The negative of a tensor over the same memory, which torch.save keeps as such; the public function makes a copy. Not for speed: a file
# is read without allocating.
negative_view: Callable[[torch.Tensor], torch.Tensor] = _find("_neg_view", torch.neg)

# Whether a profiler wants to be told of an optimizer's step (1.1; an update alone 1.5). Where that is unknown, it is always told.
profiler_enabled: Callable[[], bool] = _find("_C._autograd._profiler_enabled", lambda: True)

# Whether a backward may be followed by another through the same graph (1.1). Where that is unknown, its gradients are copies.
keeps_graph: Callable[[], bool] = _find("_C._autograd._get_current_graph_task_keep_graph", lambda: True)

# The reference counts of a storage (2.1 to 3.5) and of a tensor (1.4 for train_step): memory for gradients, and the tensors on it, are
# used again when nothing else refers to them.
_storage_uses: Callable[[int], int] | None = _find("_C._storage_Use_Count", None)
_tensor_uses: Callable[[torch.Tensor], int] | None = _find("Tensor._use_count", None)
_address: Any = _find("UntypedStorage._cdata", None)
_unlike_any_before = itertools.count()


def storage_uses(tensor: torch.Tensor) -> int:
    """How many refer to the tensor's storage. Where that can't be known it is another number each time, so that nothing looks unused."""
    if _storage_uses is None or _address is None:
        return next(_unlike_any_before)
    return int(_storage_uses(tensor.untyped_storage()._cdata))


def counts_tensor_uses() -> bool:
    return _tensor_uses is not None


def tensor_uses(tensors: _Tensors) -> list[tuple[int, int]]:
    """How often each is referred to, from Python and from C++; only where `counts_tensor_uses`."""
    assert _tensor_uses is not None
    return [(sys.getrefcount(tensor), _tensor_uses(tensor)) for tensor in tensors]


# Hooks of all optimizers, and of one (1.1; an update alone 1.7). PyTorch's wrapper calls them around `step`; ours is skipped where there
# are none.
_before_any: dict[Any, Any] | None = _find("optim.optimizer._global_optimizer_pre_hooks", None)
_after_any: dict[Any, Any] | None = _find("optim.optimizer._global_optimizer_post_hooks", None)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something is to be called before or after the optimizer's step; True where that can't be known."""
    if _before_any is None or _after_any is None:
        return True
    own = vars(optimizer)
    try:
        return bool(own["_optimizer_step_pre_hooks"] or own["_optimizer_step_post_hooks"] or _before_any or _after_any)
    except KeyError:
        return True


# Classes in modules that take a second to import: looked for only where somebody has imported such a module, for nobody can have made an
# object of the class before. They had other names before they became public, and some builds of PyTorch have none.
_CLASSES = {
    "DTensor": ("torch.distributed.tensor", "torch.distributed._tensor"),
    "FSDPModule": ("torch.distributed.fsdp", "torch.distributed._composable.fsdp"),
    "OptimizedModule": ("torch._dynamo.eval_frame",),
    "ZeroRedundancyOptimizer": ("torch.distributed.optim",),
}


def _is_a(name: str, value: object) -> bool:
    """Whether the value is of the class, or of a subclass."""
    found = (vars(sys.modules[module]).get(name) for module in _CLASSES[name] if module in sys.modules)
    return any(isinstance(kind, type) and isinstance(value, kind) for kind in found)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, one of whose pieces this process holds."""
    return _is_a("DTensor", tensor)


def is_fsdp(module: nn.Module) -> bool:
    """Whether FSDP2's `fully_shard` was called on it."""
    return _is_a("FSDPModule", module)


def is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is a ZeroRedundancyOptimizer, whose state is spread over the ranks."""
    return _is_a("ZeroRedundancyOptimizer", optimizer)


def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module inside what `torch.compile` returned, and None for any other."""
    return module._modules.get("_orig_mod") if _is_a("OptimizedModule", module) else None
