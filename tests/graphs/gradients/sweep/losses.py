"""The losses of `torch.nn`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .case import loss


def _classes(count: int, *shape: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randint(0, count, (batch, *shape))


def _ignored(batch: int) -> torch.Tensor:
    labels = torch.randint(0, 5, (batch,))
    labels[0] = -100
    return labels


def _numbers(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randn(batch, *shape)


def _shares(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.rand(batch, *shape) * 0.8 + 0.1


def _signs(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randint(0, 2, (batch, *shape)).float() * 2 - 1


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3, 6])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.inner(x, target).loss


LOSSES = [
    loss("CrossEntropyLoss", nn.CrossEntropyLoss, (5,), _classes(5), ordinary=True),
    loss("CrossEntropyLoss ignore_index", nn.CrossEntropyLoss, (5,), _ignored),
    loss("CrossEntropyLoss weight", lambda: nn.CrossEntropyLoss(torch.rand(5) + 0.5), (5,), _classes(5)),
    loss("CrossEntropyLoss smoothing", lambda: nn.CrossEntropyLoss(torch.rand(5) + 0.5, label_smoothing=0.1), (5,), _ignored),
    loss("CrossEntropyLoss sum", lambda: nn.CrossEntropyLoss(reduction="sum"), (5,), _classes(5)),
    loss("CrossEntropyLoss 2d", nn.CrossEntropyLoss, (5, 3, 4), _classes(5, 3, 4)),
    loss("CrossEntropyLoss shares", nn.CrossEntropyLoss, (5,), lambda batch: torch.softmax(torch.randn(batch, 5), 1)),
    loss("NLLLoss", lambda: lambda x, y: F.nll_loss(F.log_softmax(x, 1), y), (5,), _classes(5)),
    loss("MSELoss", nn.MSELoss, (4,), _numbers(4)),
    loss("L1Loss", nn.L1Loss, (4,), _numbers(4)),
    loss("SmoothL1Loss", nn.SmoothL1Loss, (4,), _numbers(4)),
    loss("HuberLoss", nn.HuberLoss, (4,), _numbers(4)),
    loss("BCELoss", nn.BCELoss, (4,), _shares(4), kind="probability"),
    loss("BCEWithLogitsLoss", nn.BCEWithLogitsLoss, (4,), _shares(4)),
    loss("BCEWithLogitsLoss weighted", lambda: nn.BCEWithLogitsLoss(torch.rand(4), pos_weight=torch.rand(4) + 1), (4,), _shares(4)),
    loss("KLDivLoss", lambda: nn.KLDivLoss(reduction="batchmean"), (4,), _shares(4)),
    loss("KLDivLoss log", lambda: nn.KLDivLoss(reduction="batchmean", log_target=True), (4,), _numbers(4)),
    loss("PoissonNLLLoss", nn.PoissonNLLLoss, (4,), _shares(4)),
    loss("PoissonNLLLoss full", lambda: nn.PoissonNLLLoss(full=True), (4,), lambda batch: torch.randint(0, 5, (batch, 4)).float()),
    loss("GaussianNLLLoss", nn.GaussianNLLLoss, (4,), lambda batch: (torch.randn(batch, 4), torch.rand(batch, 4) + 0.1)),
    loss("GaussianNLLLoss full", lambda: nn.GaussianNLLLoss(full=True), (4,), lambda n: (torch.randn(n, 4), torch.rand(n, 1) + 1)),
    loss("HingeEmbeddingLoss", nn.HingeEmbeddingLoss, (4,), _signs(4)),
    loss("SoftMarginLoss", nn.SoftMarginLoss, (4,), _signs(4)),
    loss("MultiLabelSoftMarginLoss", nn.MultiLabelSoftMarginLoss, (4,), _shares(4)),
    loss("MultiLabelMarginLoss", nn.MultiLabelMarginLoss, (4,), lambda batch: torch.tensor([[3, 0, -1, 1]]).repeat(batch, 1)),
    loss("MultiMarginLoss", nn.MultiMarginLoss, (4,), _classes(4)),
    loss("MarginRankingLoss", lambda: lambda x, y: F.margin_ranking_loss(x, x.flip(-1), y), (4,), _signs(4)),
    loss("CosineEmbeddingLoss", lambda: lambda x, y: F.cosine_embedding_loss(x, x.flip(-1), y), (4,), _signs()),
    loss("TripletMarginLoss", lambda: lambda x, y: F.triplet_margin_loss(x, y, y.flip(-1)), (4,), _numbers(4)),
    loss("CTCLoss", lambda: _ctc, (7, 5), _classes(4, 3)),
    loss("AdaptiveLogSoftmaxWithLoss", lambda: Adaptive(), (4,), _classes(10)),
]  # fmt: skip


def _ctc(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """All sequences are 7 steps, all texts 3 labels."""
    steps = F.log_softmax(x, 2).transpose(0, 1)
    ones = torch.ones_like(labels[:, 0])
    return F.ctc_loss(steps, labels + 1, ones * 7, ones * 3)
