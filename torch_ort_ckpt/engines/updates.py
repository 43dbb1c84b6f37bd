"""The optimizer step of `optimizer_model.onnx` in torch: ORT's AdamW (both modes), SGD and gradient clipping, in place.

Pure functions over lists of tensors; they follow ORT's kernels to rounding. Hyperparameters are the attributes of the ONNX node.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UnsupportedError

DECAY_FIRST = 0
"""`adam_mode` of torch.optim.AdamW: decay before the update, epsilon added after the bias correction."""
DECAY_LAST = 1
"""`adam_mode` of ORT's artifacts (and of Hugging Face's AdamW): epsilon added before the bias correction, decay after the update."""


@dataclass(frozen=True)
class AdamWSettings:
    """The attributes of `com.microsoft.AdamWOptimizer`, with the values that ORT's artifact generation gives them."""

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-6
    weight_decay: float = 0.0
    adam_mode: int = DECAY_LAST
    correct_bias: bool = True

    def __post_init__(self) -> None:
        if self.adam_mode not in (DECAY_FIRST, DECAY_LAST):
            raise UnsupportedError(f"adam_mode {self.adam_mode} is unknown", field="adam_mode", remedy="ORT defines 0 and 1.")


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int,
    lr: float,
    settings: AdamWSettings,
) -> None:
    """One AdamW step. `step` counts from 1 (what ORT's node is fed: completed steps + 1)."""
    beta1, beta2 = settings.betas
    # Without bias correction the corrections are 1: what beta ** step leaves for a step that is large enough.
    correction = math.sqrt(1 - beta2**step) if settings.correct_bias else 1.0
    count = float(step) if settings.correct_bias else math.inf
    decay_first = settings.adam_mode == DECAY_FIRST

    def kernel(params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor]) -> None:
        # The kernel divides sqrt(v) by the correction and then adds epsilon. DECAY_LAST adds epsilon to the plain sqrt(v), which is
        # the same update with epsilon divided by the correction.
        torch._fused_adamw_(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [torch.tensor(count, dtype=torch.float32, device=params[0].device)] * len(params),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=settings.weight_decay if decay_first else 0.0,
            eps=settings.epsilon if decay_first else settings.epsilon / correction,
            amsgrad=False,
            maximize=False,
        )
        if settings.weight_decay and not decay_first:
            torch._foreach_mul_(params, 1 - lr * settings.weight_decay)

    _by_kind(kernel, params, grads, exp_avgs, exp_avg_sqs)


def sgd_(params: Sequence[Tensor], grads: Sequence[Tensor], *, lr: float) -> None:
    """One step of `SGDOptimizerV2`, which is plain SGD: ORT never uses the momentum it keeps for it."""

    def kernel(params: list[Tensor], grads: list[Tensor]) -> None:
        torch._foreach_add_(params, grads, alpha=-lr)

    _by_kind(kernel, params, grads)


def clip_grad_norm_(grads: Sequence[Tensor], max_norm: float) -> Tensor:
    """`InplaceClipGradNorm`: scale the gradients so that their joint 2-norm is at most `max_norm`; returns the norm before."""
    if not grads:
        return torch.zeros(())
    norms = [norm.to(grads[0].device) for norm in torch._foreach_norm(list(grads))]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)

    def kernel(grads: list[Tensor]) -> None:
        torch._foreach_mul_(grads, scale.to(grads[0].device, grads[0].dtype))

    _by_kind(kernel, grads)
    return total


def _by_kind(kernel: Callable[..., None], *lists: Sequence[Tensor]) -> None:
    """Run `kernel` once per (device, dtype) of the first list: the fused and foreach kernels want tensors of one kind."""
    places: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for place, tensor in enumerate(lists[0]):
        places[tensor.device, tensor.dtype].append(place)
    with torch.no_grad():
        for members in places.values():
            kernel(*([values[place] for place in members] for values in lists))
