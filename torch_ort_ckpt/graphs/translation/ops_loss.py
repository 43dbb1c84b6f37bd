"""The losses that ONNX has as operators; MSE, BCE and L1 arrive as the arithmetic that ORT's artifact generation writes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import MICROSOFT, Scalar, register_op

_NO_CLASS = -(2**62)
"""An `ignore_index` that no label has. PyTorch's default would ignore the label -100."""


@register_op("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    outputs: int = 1,
) -> Any:
    """The second output is the log of the probabilities."""
    ignored = _NO_CLASS if ignore_index is None else ignore_index
    if outputs == 1:
        return F.cross_entropy(scores, labels.long(), weights, ignore_index=ignored, reduction=reduction)
    log_prob = torch.log_softmax(scores, 1)
    return F.nll_loss(log_prob, labels.long(), weights, ignore_index=ignored, reduction=reduction), log_prob


@register_op("SoftmaxCrossEntropyLossInternal", domain=MICROSOFT)
def softmax_cross_entropy_loss_internal(
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    ignore_index: Scalar | None = None,
    *,
    output_type: int = 1,
    reduction: str = "mean",
    outputs: int = 1,
) -> Any:
    """What ORT's graph transformers make of it: the ignored label is an input."""
    ignored = None if ignore_index is None else int(ignore_index)
    return softmax_cross_entropy_loss(scores, labels, weights, ignore_index=ignored, reduction=reduction, outputs=outputs)


@register_op("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(
    log_prob: Tensor, labels: Tensor, weights: Tensor | None = None, *, ignore_index: int | None = None, reduction: str = "mean"
) -> Tensor:
    return F.nll_loss(
        log_prob, labels.long(), weights, ignore_index=_NO_CLASS if ignore_index is None else ignore_index, reduction=reduction
    )
