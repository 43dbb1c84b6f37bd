"""Special functions that ONNX does not have: lgamma, digamma, erfinv."""

from __future__ import annotations

import math

import torch

from .registry import after

aten = torch.ops.aten
SHIFT = 8
"""The asymptotic series hold for large arguments: smaller ones are shifted by the recurrence."""


def _polynomial(x: torch.Tensor, coefficients: list[float]) -> torch.Tensor:
    """The constant first."""
    result = x * coefficients[-1]
    for coefficient in reversed(coefficients[1:-1]):
        result = (result + coefficient) * x
    return result + coefficients[0]


@after(aten.lgamma.default)
def lgamma(x: torch.Tensor) -> torch.Tensor:
    """Stirling's series, and the reflection formula for negative arguments."""
    negative = x < 0.5
    positive = torch.where(negative, 1.0 - x, x)
    shifted = positive + SHIFT
    inverse = 1.0 / shifted
    square = inverse * inverse
    series = inverse * (
        1 / 12 - square * (1 / 360 - square * (1 / 1260 - square * (1 / 1680 - square * (1 / 1188 - square * (691 / 360360)))))
    )
    value = (shifted - 0.5) * torch.log(shifted) - shifted + 0.5 * math.log(2 * math.pi) + series
    steps = positive
    for k in range(1, SHIFT):
        steps = steps * (positive + k)
    value = value - torch.log(steps)
    fraction = x - torch.floor(x)
    reflected = math.log(math.pi) - torch.log(torch.sin(math.pi * fraction).abs()) - value
    return torch.where(negative, reflected, value)


@after(aten.digamma.default)
def digamma(x: torch.Tensor) -> torch.Tensor:
    negative = x < 0.5
    positive = torch.where(negative, 1.0 - x, x)
    shifted = positive + SHIFT
    square = 1.0 / (shifted * shifted)
    series = square * _polynomial(square, [1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760])
    value = torch.log(shifted) - 0.5 / shifted - series
    for k in range(SHIFT):
        value = value - 1.0 / (positive + k)
    fraction = x - torch.floor(x)
    reflected = value - math.pi * torch.cos(math.pi * fraction) / torch.sin(math.pi * fraction)
    return torch.where(negative, reflected, value)


@after(aten.erfinv.default)
def erfinv(x: torch.Tensor) -> torch.Tensor:
    """Winitzki's approximation, then three steps of Newton's and Halley's method on erf."""
    a = 0.147
    logarithm = torch.log1p(-x * x)
    half = 2 / (math.pi * a) + logarithm / 2
    value = torch.sign(x) * torch.sqrt(torch.sqrt(half * half - logarithm / a) - half)
    inside = x.abs() < 1
    value = torch.where(inside, value, 0.0)
    for _ in range(3):
        # The complement keeps its precision where erf is close to one.
        error = torch.where(value >= 0, (1.0 - x) - torch.erfc(value), torch.erfc(-value) - (1.0 + x))
        step = error / (2 / math.sqrt(math.pi) * torch.exp(-value * value))
        value = value - step / (1.0 + value * step)
    edge = torch.where(x.abs() == 1, torch.sign(x) * float("inf"), float("nan"))
    return torch.where(inside, value, edge)
