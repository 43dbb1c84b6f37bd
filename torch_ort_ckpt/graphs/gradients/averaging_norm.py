"""BatchNorm with `momentum=None`: PyTorch computes the factor of its average with a Python number, which no graph can hold."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .dynamic_check import BATCH_NORMS


def use_tensors(module: nn.Module) -> None:
    """Let such layers of a copy compute the same with tensors (in place)."""
    for layer in module.modules():
        if isinstance(layer, BATCH_NORMS) and layer.momentum is None and layer.track_running_stats:
            setattr(layer, "forward", types.MethodType(_forward, layer))  # noqa: B010  # a method, to type checkers


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not self.training:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
    with torch.no_grad():
        self.num_batches_tracked.add_(1)
        share = 1.0 / self.num_batches_tracked.to(torch.float32)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        batch = x.detach()
        variance, mean = torch.var_mean(batch, axes, correction=1)
        self.running_mean.copy_(self.running_mean + share * (mean - self.running_mean))
        self.running_var.copy_(self.running_var + share * (variance - self.running_var))
    return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
