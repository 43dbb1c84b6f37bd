"""Arithmetic, comparison and elementwise functions, and matrix products."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import Int, Kind, Operand, Scalar, register_op

_UNARY: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Det": torch.det,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Identity": torch.clone,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "MatMul": torch.matmul,
}
for _name, _function in _UNARY.items():
    register_op(_name)(_function)

# Python's operators: a constant scalar stays a number and needs no tensor on the right device.
_BINARY: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Equal": operator.eq,
    "And": operator.and_,
    "Or": operator.or_,
    "Xor": operator.xor,
    "BitwiseAnd": operator.and_,
    "BitwiseOr": operator.or_,
    "BitwiseXor": operator.xor,
}
for _name, _function in _BINARY.items():
    register_op(_name, takes=(Kind.OPERAND, Kind.OPERAND))(_function)


@register_op("Div")
def div(a: Operand, b: Operand) -> Any:
    """Integers truncate toward zero, as in C."""
    number = a if isinstance(a, Tensor) else b
    return a / b if number.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


@register_op("Mod")
def mod(a: Operand, b: Operand, *, fmod: int = 0) -> Any:
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


@register_op("Pow")
def power(a: Tensor, b: Scalar) -> Tensor:
    """The result has the base's type."""
    return torch.pow(a, b).to(a.dtype)


@register_op("BitShift")
def bit_shift(a: Tensor, b: Tensor, *, direction: str) -> Tensor:
    # torch shifts no unsigned type but uint8.
    x, y = a.to(torch.int64), b.to(torch.int64)
    shifted = x << y if direction == "LEFT" else (x >> y) & ((1 << (64 - y)) - 1).where(y > 0, -1)
    return shifted.to(a.dtype)


@register_op("Clip")
def clip(x: Tensor, low: Scalar | None = None, high: Scalar | None = None, *, min: float | None = None, max: float | None = None) -> Tensor:
    """The bounds are attributes before opset 11 and inputs since."""
    low, high = low if low is not None else min, high if high is not None else max
    return x if low is None and high is None else torch.clamp(x, low, high)


@register_op("Max")
def maximum(*values: Tensor) -> Tensor:
    result = values[0]
    for value in values[1:]:
        result = torch.maximum(result, value)
    return result


@register_op("Min")
def minimum(*values: Tensor) -> Tensor:
    result = values[0]
    for value in values[1:]:
        result = torch.minimum(result, value)
    return result


@register_op("Sum")
def add_all(*values: Tensor) -> Tensor:
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result


@register_op("Mean")
def mean_of_all(*values: Tensor) -> Tensor:
    return add_all(*values) / len(values)


@register_op("Where")
def where(condition: Tensor, a: Operand, b: Operand) -> Tensor:
    return torch.where(condition, a, b)


@register_op("IsInf")
def is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    if detect_negative and detect_positive:
        return torch.isinf(x)
    if detect_positive:
        return torch.isposinf(x)
    return torch.isneginf(x) if detect_negative else torch.zeros_like(x, dtype=torch.bool)


@register_op("Elu")
def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


@register_op("Celu")
def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.celu(x, alpha)


@register_op("Selu")
def selu(x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Tensor:
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


@register_op("LeakyRelu")
def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


@register_op("PRelu")
def prelu(x: Tensor, slope: Tensor) -> Tensor:
    """The slope broadcasts from the right, unlike torch's."""
    return torch.where(x < 0, x * slope, x)


@register_op("ThresholdedRelu")
def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.threshold(x, alpha, 0.0)


@register_op("HardSigmoid")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return torch.clamp(x * alpha + beta, 0.0, 1.0)


@register_op("HardSwish")
def hard_swish(x: Tensor) -> Tensor:
    return F.hardswish(x)


@register_op("Swish")
def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@register_op("Softplus")
def softplus(x: Tensor) -> Tensor:
    return F.softplus(x)


@register_op("Softsign")
def softsign(x: Tensor) -> Tensor:
    return F.softsign(x)


@register_op("Mish")
def mish(x: Tensor) -> Tensor:
    return F.mish(x)


@register_op("Gelu")
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


@register_op("Shrink")
def shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x)))


@register_op("Softmax", since=13)
def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.softmax(x, axis)


@register_op("LogSoftmax", since=13)
def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.log_softmax(x, axis)


@register_op("Hardmax", since=13)
def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    best = x.argmax(axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, best, 1.0)


def _rows(x: Tensor, axis: int) -> Tensor:
    """Before opset 13 these operators work on the matrix that `axis` cuts the tensor into."""
    return x.reshape(math.prod(x.shape[:axis]), -1) if axis else x.reshape(1, -1)


@register_op("Softmax")
def softmax_of_rows(x: Tensor, *, axis: int = 1) -> Tensor:
    return torch.softmax(_rows(x, axis % x.dim()), -1).reshape(x.shape)


@register_op("LogSoftmax")
def log_softmax_of_rows(x: Tensor, *, axis: int = 1) -> Tensor:
    return torch.log_softmax(_rows(x, axis % x.dim()), -1).reshape(x.shape)


@register_op("Hardmax")
def hardmax_of_rows(x: Tensor, *, axis: int = 1) -> Tensor:
    return hardmax(_rows(x, axis % x.dim())).reshape(x.shape)


@register_op("Gemm")
def gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0
) -> Tensor:
    if transB and not transA and alpha == beta == 1.0 and (c is None or c.dim() == 1):
        return F.linear(a, b, c)
    a, b = a.t() if transA else a, b.t() if transB else b
    if c is None:
        return torch.mm(a, b) if alpha == 1.0 else alpha * torch.mm(a, b)
    return torch.addmm(c, a, b, beta=beta, alpha=alpha)


@register_op("Einsum")
def einsum(*values: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation.replace(" ", ""), *values)


@register_op("CumSum")
def cumulative_sum(x: Tensor, axis: Int, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    x = x.flip(axis) if reverse else x
    total = x.cumsum(axis, dtype=x.dtype)
    total = total - x if exclusive else total
    return total.flip(axis) if reverse else total
