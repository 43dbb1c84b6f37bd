"""A faster form of the mean cross entropy over class indices: the same result in half as many operators, for losses of small models.

The plain forms are PyTorch's, with negative labels moved out of range (`label_range.py`), as here.
"""

from __future__ import annotations

import torch

from .registry import fast

aten = torch.ops.aten
_MEAN = 1


@fast(aten.nll_loss_forward.default)
def nll_loss_forward(
    scores: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and how many labels it counts."""
    if scores.dim() != 2 or labels.dim() != 1 or weight is not None or reduction != _MEAN:
        return NotImplemented
    column = labels.unsqueeze(1)
    ignored = column == ignore_index
    place = torch.where(ignored, 0, column)
    # ONNX counts a negative index from the end; beyond the classes every runtime refuses it.
    place = torch.where(place < 0, scores.shape[1], place)
    lost = torch.where(ignored, 0.0, -scores.gather(1, place))
    count = torch.where(ignored, 0.0, torch.ones([], dtype=scores.dtype, device=scores.device)).sum()
    return lost.sum() / count, count


@fast(aten.nll_loss_backward.default)
def nll_loss_backward(
    gradient: torch.Tensor,
    scores: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    if scores.dim() != 2 or labels.dim() != 1 or weight is not None or reduction != _MEAN:
        return NotImplemented
    column = labels.unsqueeze(1)
    share = torch.where(column == ignore_index, 0.0, -gradient / total_weight)
    chosen = column == torch.arange(scores.shape[1], device=scores.device)
    return chosen.to(scores.dtype) * share
