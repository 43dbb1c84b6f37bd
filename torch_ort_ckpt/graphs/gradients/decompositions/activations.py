"""Layers whose operators have no translation: RReLU, Bilinear."""

from __future__ import annotations

from typing import Any

import torch

from .registry import before

aten = torch.ops.aten


@before(aten.rrelu_with_noise.default)
def rrelu_with_noise(
    x: torch.Tensor, noise: torch.Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> torch.Tensor:
    """Outside of training its slope is the mean of the bounds. In training it is random, and the operator stays."""
    if training:
        return NotImplemented
    return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)


@before(aten.rrelu.default)
def rrelu(x: torch.Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, generator: Any = None) -> torch.Tensor:
    return rrelu_with_noise(x, x, lower, upper, training, generator)


@before(aten.bilinear.default)
def bilinear(a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[..., O]: the sum of a_i weight_oij b_j."""
    outputs, first, second = weight.shape
    product = torch.matmul(a, weight.permute(1, 0, 2).reshape([first, outputs * second])).reshape([*a.shape[:-1], outputs, second])
    result = (product * b.unsqueeze(-2)).sum(-1)
    return result if bias is None else result + bias
