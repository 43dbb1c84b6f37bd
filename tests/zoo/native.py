"""PyTorch's own answer: loss, gradients, buffers and the losses of a few optimizer steps, in float32 and in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .entry import Batch, Entry

STEPS = 5
_NAMED: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "l1": F.l1_loss,
}


@dataclass(frozen=True)
class Answer:
    """What one batch gives."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


def loss_of(entry: Entry, module: nn.Module, inputs: Batch, targets: Batch) -> torch.Tensor:
    """The loss, as a user would compute it in PyTorch."""
    result = module(**inputs)
    if entry.loss is None:
        found = result[0] if isinstance(result, (tuple, list)) else result["loss"] if isinstance(result, Mapping) else result
    else:
        function = _NAMED[entry.loss] if isinstance(entry.loss, str) else entry.loss
        found = function(result, *targets.values())
    assert isinstance(found, torch.Tensor)
    return found


def answer(entry: Entry, module: nn.Module, inputs: Batch, targets: Batch) -> Answer:
    """Loss and gradients of a copy of the module."""
    twin = copy.deepcopy(module)
    with sdpa_kernel(SDPBackend.MATH):
        loss = loss_of(entry, twin, inputs, targets)
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in twin.named_parameters() if parameter.grad is not None}
    return Answer(loss.detach(), gradients, {name: value.detach() for name, value in twin.named_buffers()})


def steps(entry: Entry, module: nn.Module, inputs: Batch, targets: Batch, lr: float) -> list[float]:
    """The losses of AdamW steps on one batch."""
    twin = copy.deepcopy(module)
    optimizer = torch.optim.AdamW([item for item in twin.parameters() if item.requires_grad], lr=lr)
    losses = []
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(STEPS):
            loss = loss_of(entry, twin, inputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def doubled(batch: Batch) -> Batch:
    return {name: value.double() if value.dtype == torch.float32 else value for name, value in batch.items()}


def tree_size(module: nn.Module) -> int:
    """How many numbers the module trains."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
