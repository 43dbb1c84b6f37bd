"""CTC loss against autograd: texts and sequences of different lengths, repeated labels, impossible texts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from .agreement import check, trace

GONE = ["_ctc_loss", "_ctc_loss_backward"]


def _batch(n: int) -> list[torch.Tensor]:
    return [
        torch.randn(6, n, 5, dtype=torch.float64),
        torch.randint(1, 5, (n, 3)),
        torch.randint(5, 7, (n,)),
        torch.randint(1, 3, (n,)),
    ]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_lengths_differ(reduction):
    def run(x, labels, steps, lengths):
        return F.ctc_loss(F.log_softmax(x, 2), labels, steps, lengths, reduction=reduction)

    check(run, _batch(3), _batch(5), dynamic=[[1], [0], [0], [0]], gone=GONE)


def test_equal_labels_need_a_blank_between():
    x, _, steps, lengths = _batch(3)
    labels = torch.tensor([[2, 2, 1], [1, 1, 1], [3, 2, 2]])

    def run(x, labels, steps, lengths):
        return F.ctc_loss(F.log_softmax(x, 2), labels, steps, lengths)

    check(run, [x, labels, steps, lengths + 1], gone=GONE)


def test_another_blank():
    x, labels, steps, lengths = _batch(3)
    check(lambda *a: F.ctc_loss(F.log_softmax(a[0], 2), a[1] - 1, a[2], a[3], blank=4), [x, labels, steps, lengths], gone=GONE)


def test_impossible_texts_count_as_zero_where_asked():
    x, labels, _, _ = _batch(3)
    steps = torch.tensor([1, 6, 6])

    def run(x, labels, steps, lengths):
        return F.ctc_loss(F.log_softmax(x, 2), labels, steps, lengths, zero_infinity=True)

    check(run, [x, labels, steps, torch.full([3], 3)], gone=GONE)


def test_texts_in_one_row_are_refused_by_name():
    x, _, steps, lengths = _batch(3)
    lengths = torch.tensor([2, 1, 3])
    labels = torch.randint(1, 5, (6,))
    with pytest.raises(DynamicOutputShapeException, match="_ctc_loss"):
        trace(lambda *a: F.ctc_loss(F.log_softmax(a[0], 2), a[1], a[2], a[3]), [x, labels, steps, lengths])
