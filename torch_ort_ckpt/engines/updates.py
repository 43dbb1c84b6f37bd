"""One optimizer step on tensors that PyTorch owns, and the optimizer graph's mathematics on PyTorch's kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from ..graphs.artifacts import OptimizerSpec
from ..pytorch_private import foreach_add_, foreach_mul_, foreach_norm, fused_adamw_
from . import Tensors


@dataclass
class Update:
    """What one parameter group needs for one step. `step` counts from 1 and includes this one."""

    parameters: Tensors
    gradients: Tensors
    first: Tensors
    second: Tensors
    step: int
    lr: float
    hyperparameters: OptimizerSpec


class Updater(Protocol):
    def apply(self, update: Update) -> bool:
        """Update parameters and moments in place; returns whether it did (a graph may skip the update)."""


class TorchUpdater:
    """The graph's mathematics on PyTorch's fused and foreach kernels, for any device."""

    def __init__(self) -> None:
        self._step = torch.zeros(())

    def apply(self, update: Update) -> bool:
        spec, parameters, gradients = update.hyperparameters, list(update.parameters), list(update.gradients)
        if spec.max_norm is not None:
            clip_gradients(gradients, spec.max_norm)
        if spec.kind == "SGD":
            foreach_add_(parameters, gradients, alpha=-update.lr)
            return True
        lr, eps, decay = update.lr, spec.eps, spec.weight_decay
        beta1, beta2 = spec.betas
        correction1, correction2 = 1 - beta1**update.step, math.sqrt(1 - beta2**update.step)
        # PyTorch's kernel computes p -= lr / c1 * m / (sqrt(v) / c2 + eps). Both of ORT's variants are that with different values:
        if not spec.correct_bias:  # p -= lr * m / (sqrt(v) + eps)
            lr, eps = lr * correction1 / correction2, eps / correction2
        elif spec.adam_mode == 1:  # p -= lr * c2 / c1 * m / (sqrt(v) + eps)
            eps = eps / correction2
        early = decay * update.lr / lr if spec.adam_mode == 0 and lr else 0.0  # mode 0 decays before the update, by the true rate
        device = parameters[0].device
        if self._step.device != device:
            self._step = torch.zeros((), device=device)
        steps = [self._step.fill_(update.step)] * len(parameters)
        fused_adamw_(
            parameters,
            gradients,
            list(update.first),
            list(update.second),
            [],
            steps,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=early,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
        if spec.adam_mode == 1 and decay:
            foreach_mul_(parameters, 1 - update.lr * decay)
        return True


def clip_gradients(gradients: list[torch.Tensor], max_norm: float) -> None:
    """As ORT's InplaceClipGradNorm: scale all gradients so that their common norm is at most `max_norm`."""
    norms = foreach_norm(gradients)
    total = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))
    foreach_mul_(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))
