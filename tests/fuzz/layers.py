"""Layers for `Chain`: every operator that ORT 1.19.2 has a gradient for, in the shapes and settings that models use, and odd ones.

Each function adds one layer to the chain; what it looks like follows from the choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import Tensor

from .chains import CLASSES, TOKENS, Chain, Choices

Layer = Callable[[Chain, Choices], None]
LAYERS: dict[str, Layer] = {}


def layer(function: Layer) -> Layer:
    LAYERS[function.__name__] = function
    return function


def images(chain: Chain, choices: Choices, rank: int, channels: int | None = None) -> None:
    """Make sure that samples are [channels, *spatial] of this rank."""
    if len(chain.shape) != rank + 2 or (channels is not None and chain.shape[1] % channels) or math.prod(chain.shape[2:]) == 1:
        chain.into(channels or choices.of((4, 6, 1)), *(choices.of((5, 4, 7)) for _ in range(rank)))


def axis_of(chain: Chain, choices: Choices) -> int:
    """One that is not the batch, counted from either end."""
    axis = 1 + choices.pick(len(chain.shape) - 1)
    return axis - len(chain.shape) if choices.flag() else axis


@layer
def convolution(chain: Chain, choices: Choices) -> None:
    rank = 1 + choices.pick(3)
    images(chain, choices, rank, choices.of((1, 2, 4, 6)))
    size, channels = chain.shape[2:], chain.shape[1]
    groups = choices.of([count for count in (1, 2, 3, 4, 6, channels) if channels % count == 0])
    kernel = [min(1 + choices.pick(3), size[axis]) for axis in range(rank)]
    dilations = [1 + choices.pick(2) if (kernel[axis] - 1) * 2 < size[axis] else 1 for axis in range(rank)]
    strides = [1 + choices.pick(3) for _ in range(rank)]
    attributes: dict[str, Any] = {"group": groups, "strides": strides, "dilations": dilations, "kernel_shape": kernel}
    pads = [[0, 0] for _ in range(rank)]
    automatic = choices.of(("NOTSET", "NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"))
    if automatic == "NOTSET":
        pads = [[choices.pick(2), choices.pick(3)] for _ in range(rank)]
        attributes["pads"] = [before for before, _ in pads] + [after for _, after in pads]
    else:
        attributes["auto_pad"] = automatic
    if automatic.startswith("SAME"):
        dilations[:] = [1] * rank  # ORT refuses others
        for axis in range(rank):
            total = max((math.ceil(size[axis] / strides[axis]) - 1) * strides[axis] + kernel[axis] - size[axis], 0)
            pads[axis] = [total // 2, total - total // 2] if automatic == "SAME_UPPER" else [total - total // 2, total // 2]
    padding = [amount for pair in reversed(pads) for amount in pair]
    count = groups * (1 + choices.pick(3))
    inputs = [chain.current, chain.weight(count, channels // groups, *kernel)]
    if choices.flag():
        inputs.append(chain.weight(count))
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]

    def function(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor = convolve(F.pad(x, padding), weight, bias, strides, 0, dilations, groups)
        return result

    chain.then("Conv", inputs, function, **attributes)


@layer
def transposed_convolution(chain: Chain, choices: Choices) -> None:
    images(chain, choices, 2, 2)
    channels, groups = chain.shape[1], 1 + choices.pick(2)
    weight = chain.weight(channels, 2, 3, 3)
    chain.then(
        "ConvTranspose",
        [chain.current, weight],
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, groups=groups),
        group=groups,
        strides=[2, 2],
        pads=[1, 1, 1, 1],
        kernel_shape=[3, 3],
    )


def _pool(chain: Chain, choices: Choices) -> tuple[int, list[int], list[int], list[int], int]:
    rank = 1 + choices.pick(3)
    images(chain, choices, rank)
    kernel = [min(1 + choices.pick(3), size) for size in chain.shape[2:]]
    strides = [1 + choices.pick(3) for _ in range(rank)]
    pads = [choices.pick(2) if size > 1 else 0 for size in kernel]
    ceil = choices.pick(2)
    for axis, size in enumerate(chain.shape[2:]):
        windows = math.ceil((size + 2 * pads[axis] - kernel[axis]) / strides[axis])
        if windows * strides[axis] >= size + pads[axis]:  # PyTorch leaves out a window that starts in the padding, ONNX does not
            ceil = 0
    return rank, kernel, strides, pads, ceil


@layer
def max_pool(chain: Chain, choices: Choices) -> None:
    rank, kernel, strides, pads, ceil = _pool(chain, choices)
    dilations = [1 + choices.pick(2) if (kernel[axis] - 1) * 2 < chain.shape[2 + axis] else 1 for axis in range(rank)]
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
    settings = {"kernel_shape": kernel, "strides": strides, "pads": pads * 2, "dilations": dilations, "ceil_mode": ceil}
    chain.then("MaxPool", [chain.current], lambda x: pool(x, kernel, strides, pads, dilations, ceil_mode=bool(ceil)), **settings)


@layer
def average_pool(chain: Chain, choices: Choices) -> None:
    rank, kernel, strides, pads, ceil = _pool(chain, choices)
    inside = choices.pick(2)
    pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    settings = {"kernel_shape": kernel, "strides": strides, "pads": pads * 2, "ceil_mode": ceil, "count_include_pad": inside}
    chain.then("AveragePool", [chain.current], lambda x: pool(x, kernel, strides, pads, bool(ceil), bool(inside)), **settings)


@layer
def global_pool(chain: Chain, choices: Choices) -> None:
    rank = 1 + choices.pick(3)
    images(chain, choices, rank)
    axes = tuple(range(2, rank + 2))
    chain.then("GlobalAveragePool", [chain.current], lambda x: x.mean(axes, keepdim=True))


@layer
def batch_norm(chain: Chain, choices: Choices) -> None:
    rank = choices.pick(4)
    if rank:
        images(chain, choices, rank)
    elif len(chain.shape) != 2:
        chain.into(5)
    channels, momentum, epsilon = chain.shape[1], choices.of((0.9, 0.5, 0.7)), choices.of((1e-5, 1e-2))
    mean, variance = chain.weight(statistic=chain.random(channels)), chain.weight(statistic=chain.random(channels).abs() + 0.5)
    scale, shift = chain.weight(channels, scale=1.0), chain.weight(channels)
    uses = 1 + choices.pick(3)  # the same layer, in the order of the calls
    found = []
    for use in range(uses):
        source = chain.current
        if use:
            source = chain.add("Mul", [chain.current, chain.weight(1, scale=1.0)], torch.mul)[0]
        inputs = [source, scale, shift, mean, variance]
        found += chain.add(
            "BatchNormalization",
            inputs,
            lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True, 1 - momentum, epsilon),
            outputs=3,
            keep=1,
            training_mode=1,
            momentum=momentum,
            epsilon=epsilon,
        )
    total = found[0]
    for other in found[1:]:
        pair = [other, total] if choices.flag() else [total, other]
        (total,) = chain.add("Sub", pair, torch.sub)
    chain.go_on(total)


@layer
def layer_norm(chain: Chain, choices: Choices) -> None:
    if chain.opset < 17:
        return
    axis = axis_of(chain, choices)
    shape = chain.shape[axis:]
    inputs = [chain.current, chain.weight(*shape, scale=1.0)]
    if choices.flag():
        inputs.append(chain.weight(*shape))
    epsilon = choices.of((1e-5, 1e-1))
    chain.then(
        "LayerNormalization",
        inputs,
        lambda x, w, b=None: F.layer_norm(x, shape, w, b, epsilon),
        outputs=3,
        keep=1,
        axis=axis,
        epsilon=epsilon,
    )


@layer
def softmax(chain: Chain, choices: Choices) -> None:
    axis = axis_of(chain, choices)
    if choices.flag():
        chain.then("Softmax", [chain.current], lambda x: torch.softmax(x, axis), axis=axis)
    else:
        chain.then("LogSoftmax", [chain.current], lambda x: torch.log_softmax(x, axis), axis=axis)


@layer
def gemm(chain: Chain, choices: Choices) -> None:
    if len(chain.shape) != 2:
        chain.reshape(math.prod(chain.shape[1:]))
    inside, outside = chain.shape[1], 1 + choices.pick(6)
    transposed, alpha, beta = choices.pick(2), choices.of((1.0, 0.5)), choices.of((1.0, 2.0))
    inputs = [chain.current, chain.weight(*((outside, inside) if transposed else (inside, outside)), scale=1 / math.sqrt(inside))]
    if choices.flag():
        inputs.append(chain.weight(*choices.of(((outside,), (1, outside), (1,), (1, 1)))))

    def function(x: Tensor, w: Tensor, c: Tensor | None = None) -> Tensor:
        y = alpha * (x @ (w.T if transposed else w))
        return y if c is None else y + beta * c

    chain.then("Gemm", inputs, function, transB=transposed, alpha=alpha, beta=beta)


@layer
def matmul(chain: Chain, choices: Choices) -> None:
    """With a weight on either side, of as many dimensions or fewer, and broadcast over the batch."""
    if len(chain.shape) < 3:
        chain.into(*choices.of(((3, 4), (2, 3, 4), (1, 5), (2, 1, 3))))
    *_, rows, columns = chain.shape
    leading = chain.shape[:-2]
    size = choices.of((3, 1, 5))
    batched = choices.of(((), (1,), leading[-1:] if len(leading) > 1 else (1,), (1, *leading[1:])))
    if choices.flag():
        chain.then("MatMul", [chain.current, chain.weight(*batched, columns, size, scale=0.5)], torch.matmul)
    else:
        chain.then("MatMul", [chain.weight(*batched, size, rows, scale=0.5), chain.current], torch.matmul)


@layer
def attention(chain: Chain, choices: Choices) -> None:
    """Products of two computed values."""
    if len(chain.shape) < 3:
        chain.into(*choices.of(((3, 4), (2, 3, 4))))
    axes = [*range(len(chain.shape) - 2), len(chain.shape) - 1, len(chain.shape) - 2]
    (turned,) = chain.add("Transpose", [chain.current], lambda x: x.transpose(-1, -2), perm=axes)
    (scores,) = chain.add("MatMul", [chain.current, turned], torch.matmul)
    (scaled,) = chain.add("Mul", [scores, chain.weight(1, scale=0.5)], torch.mul)
    (weights,) = chain.add("Softmax", [scaled], lambda x: torch.softmax(x, -1), axis=-1)
    chain.then("MatMul", [weights, chain.current], torch.matmul)


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Relu": torch.relu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "Erf": torch.erf,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Abs": torch.abs,
    "Neg": torch.neg,
    "Identity": lambda x: x + 0,
}


@layer
def activation(chain: Chain, choices: Choices) -> None:
    kind = choices.of(list(_UNARY))
    chain.then(kind, [chain.current], _UNARY[kind])


@layer
def activation_with_settings(chain: Chain, choices: Choices) -> None:
    which, current = choices.pick(6), chain.current
    if which == 0:
        alpha = choices.of((0.01, 0.3))
        chain.then("LeakyRelu", [current], lambda x: F.leaky_relu(x, alpha), alpha=alpha)
    elif which == 1:
        least, most = choices.of(((-0.5, 0.7), (None, 0.3), (-0.2, None)))
        limits = ["" if value is None else chain.constant(value, np.float32) for value in (least, most)]
        chain.then("Clip", [current, *limits], lambda x: torch.clamp(x, least, most))
    elif which == 2:
        chain.then("Gelu", [current], F.gelu, domain="com.microsoft")
    elif which == 3:
        chain.then("QuickGelu", [current], lambda x: x * torch.sigmoid(1.702 * x), domain="com.microsoft", alpha=1.702)
    elif which == 4:
        (wide,) = chain.add("Cast", [current], lambda x: x + 0, to=onnx.TensorProto.DOUBLE)
        chain.then("Cast", [wide], lambda x: x + 0, to=onnx.TensorProto.FLOAT)
    else:
        chain.then("Dropout", [current, chain.constant(0.0, np.float32), chain.constant(True, bool)], lambda x: x + 0, outputs=2, keep=1)


@layer
def positive(chain: Chain, choices: Choices) -> None:
    """Functions that want values above zero; not too large, or rounding would dominate."""
    (bounded,) = chain.add("Tanh", [chain.current], torch.tanh)
    (squared,) = chain.add("Mul", [bounded, bounded], torch.mul)
    (value,) = chain.add("Add", [squared, chain.constant(0.5, np.float32)], lambda x: x + 0.5)
    which = choices.pick(5)
    if which == 3:
        exponent = choices.of((2.0, 3.0, 0.5, -1.0, 1.0))
        chain.then("Pow", [value, chain.constant(exponent, np.float32)], lambda x: x**exponent)
    elif which == 4:
        (small,) = chain.add("Neg", [value], torch.neg)
        chain.then("Exp", [small], torch.exp)
    else:
        kind, function = (("Sqrt", torch.sqrt), ("Log", torch.log), ("Reciprocal", torch.reciprocal))[which]
        chain.then(kind, [value], function)


def narrow(chain: Chain, choices: Choices) -> str:
    """Something computed from the value that is broadcast with it: one axis, or the batch, has the size 1 or is not there."""
    axis = choices.pick(len(chain.shape))
    keep = choices.pick(2) if axis == 0 else 1
    if choices.flag() and keep:
        limits = [chain.constant([value]) for value in (0, 1, axis)]
        (found,) = chain.add("Slice", [chain.current, *limits], lambda x: x.narrow(axis, 0, 1))
    elif chain.opset >= 18:
        found = chain.add("ReduceMean", [chain.current, chain.constant([axis])], lambda x: x.mean(axis, keepdim=bool(keep)), keepdims=keep)[
            0
        ]
    else:
        found = chain.add("ReduceMean", [chain.current], lambda x: x.mean(axis, keepdim=bool(keep)), keepdims=keep, axes=[axis])[0]
    return chain.add("Tanh", [found], torch.tanh)[0] if choices.flag() else found


_BINARY: dict[str, Any] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": torch.div,
    "Min": torch.minimum,
    "Max": torch.maximum,
}


@layer
def binary(chain: Chain, choices: Choices) -> None:
    """With a weight that is broadcast, or broadcasts the value, on either side; or with an earlier value."""
    kind, shape = choices.of(list(_BINARY)), chain.shape
    same = [name for name in chain.earlier if chain.example[name].shape == shape and chain.example[name].is_floating_point()]
    how = choices.pick(6)
    if how == 0 and same and kind != "Div":
        other = choices.of(same)
    elif how == 5:
        other = narrow(chain, choices)
    elif how == 1:
        other = chain.weight(1, *(size if choices.flag() else 1 for size in shape[1:]), scale=1.0)
    elif how == 2:
        other = chain.weight(*shape[1 + choices.pick(len(shape) - 1) :], scale=1.0)
    elif how == 3 and len(shape) > 2 and 1 in shape[1:]:
        other = chain.weight(*(3 if size == 1 else size for size in shape[1:]), scale=1.0)
    else:
        other = chain.weight(*choices.of(((), (1,), (1, 1))), scale=1.0)
    if kind == "Div":  # away from zero
        (squared,) = chain.add("Mul", [other, other], torch.mul)
        (other,) = chain.add("Add", [squared, chain.constant(0.5, np.float32)], lambda x: x + 0.5)
    pair = [other, chain.current] if choices.flag() and kind != "Div" else [chain.current, other]
    if len(chain.example[other].shape) > len(shape):
        return
    chain.then(kind, pair, _BINARY[kind])


@layer
def where(chain: Chain, choices: Choices) -> None:
    condition = chain.random(*chain.shape[1:]) > 0
    mask = chain.constant(condition.numpy(), bool)
    if choices.flag():
        other = narrow(chain, choices)
    else:
        other = chain.weight(*choices.of((chain.shape[1:], (1,), (), (1, *chain.shape[1:]))), scale=1.0)
    if choices.flag():
        chain.then("Where", [mask, other, chain.current], lambda a, b: torch.where(condition, a, b))
    else:
        chain.then("Where", [mask, chain.current, other], lambda a, b: torch.where(condition, a, b))


@layer
def embedding(chain: Chain, choices: Choices) -> None:
    """Rows of a table by the tokens, added to the value or going on by themselves."""
    width = choices.of((4, 1, 6))
    (rows,) = chain.add("Gather", [chain.weight(CLASSES, width, scale=1.0), "tokens"], lambda table, tokens: table[tokens])
    if chain.shape[1:] != (TOKENS, width):
        chain.into(TOKENS, width)
    kind = choices.of(("Add", "Mul"))
    chain.then(kind, [chain.current, rows], _BINARY[kind])
