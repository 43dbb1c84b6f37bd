"""Operators of ONNX that ATen has no name for, as operators of PyTorch: fast forms write them, and the translation takes them as they are.

Each has its meaning in plain PyTorch too, so that a decomposition that uses it can be tested against autograd without ONNX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = "torch_ort_ckpt"
_ALMOST_ONE = 1.0 - 1e-5
_EPSILON = 1e-5


@torch.library.custom_op(f"{LIBRARY}::batch_normalization", mutates_args=())
def batch_normalization(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x normalised over all axes but the second, and the mean and the population variance that it had.

    `mean` and `variance` are not used, but ONNX Runtime writes its results over them: they must be tensors of this operator alone. Its
    result is NaN where they are.
    """
    axes = [0, *range(2, x.dim())]
    of_batch, average = torch.var_mean(x, axes, correction=0)
    shape = [1, -1, *[1] * (x.dim() - 2)]
    normal = (x - average.reshape(shape)) * torch.rsqrt(of_batch + epsilon).reshape(shape)
    return normal * scale.reshape(shape) + bias.reshape(shape), average, of_batch


@batch_normalization.register_fake
def _(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(scale), torch.empty_like(scale)


@torch.library.custom_op(f"{LIBRARY}::affine_by_channel", mutates_args=())
def affine_by_channel(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """(x - mean) * scale + bias with a number for each element of the second axis, in one pass: BatchNormalization as in eval mode."""
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return (x - mean.reshape(shape)) * scale.reshape(shape) + bias.reshape(shape)


@affine_by_channel.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(f"{LIBRARY}::is_positive", mutates_args=())
def is_positive(x: torch.Tensor) -> torch.Tensor:
    """1 where x is greater than zero, 0 elsewhere: HardSigmoid, the fastest of ONNX Runtime's ways to that."""
    return (x > 0).to(x.dtype)


@is_positive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(f"{LIBRARY}::space_to_depth", mutates_args=())
def space_to_depth(x: torch.Tensor) -> torch.Tensor:
    """[N, C, H, W] to [N, 4 C, H / 2, W / 2]: the four corners of windows of 2 x 2, one after another along the channels."""
    return torch.cat([x[:, :, row::2, column::2] for row in (0, 1) for column in (0, 1)], 1)


@space_to_depth.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty([x.shape[0], 4 * x.shape[1], x.shape[2] // 2, x.shape[3] // 2])


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What `torch.onnx.export(custom_translation_table=)` takes."""
    from onnxscript import opset18 as op

    def of_batch_normalization(x: Any, scale: Any, bias: Any, mean: Any, variance: Any, epsilon: float) -> Any:
        return op.BatchNormalization(x, scale, bias, mean, variance, training_mode=1, momentum=0.0, epsilon=epsilon)

    def of_affine_by_channel(x: Any, scale: Any, bias: Any, mean: Any) -> Any:
        # A variance of one in all: ONNX has no epsilon of zero that every runtime takes. The size of `mean` is known.
        number: Any = op.Constant(value_float=_ALMOST_ONE)
        one = op.Expand(op.CastLike(number, mean), op.Shape(mean))
        return op.BatchNormalization(x, scale, bias, mean, one, epsilon=_EPSILON)

    def of_is_positive(x: Any) -> Any:
        return op.HardSigmoid(x, alpha=torch.finfo(torch.float32).max, beta=0.0)

    def of_space_to_depth(x: Any) -> Any:
        return op.SpaceToDepth(x, blocksize=2)

    library = getattr(torch.ops, LIBRARY)
    return {
        library.batch_normalization.default: of_batch_normalization,
        library.affine_by_channel.default: of_affine_by_channel,
        library.is_positive.default: of_is_positive,
        library.space_to_depth.default: of_space_to_depth,
    }
