"""`padding_idx` of an embedding: its row takes no gradient from the lookups, on either engine, as in PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_ort_ckpt as toc
from tests.official import Official

pytestmark = pytest.mark.ort

ROW = 3


class Padded(nn.Module):
    """Two lookups of one weight, which is the head's too: from there the padding row does take a gradient."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.other = nn.Embedding(10, 6, padding_idx=ROW), nn.Embedding(7, 6)
        self.head = nn.Linear(6, 10, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.embedding.weight[ROW] = 0.5  # as a pretrained one may have

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head((self.embedding(tokens) + self.embedding(tokens.flip(1)) + self.other(tokens % 7)).mean(1))


TOKENS = torch.tensor([[1, ROW, 5, ROW], [ROW, 2, 2, 9], [0, 4, 1, 8]])
LABELS = torch.tensor([ROW, 4, 0])


@pytest.mark.parametrize(("tied", "exporter"), [(True, "torchscript"), (False, "dynamo")])
def test_the_padding_row_takes_no_gradient(tied: bool, exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    native = Padded(tied)
    artifacts = toc.export_artifacts(native, (TOKENS,), tmp_path, exporter=exporter)
    expected = copy.deepcopy(native)
    F.cross_entropy(expected(TOKENS), LABELS).backward()
    assert bool(expected.embedding.weight.grad[ROW].any()) == tied
    for engine in ("ort", "torch"):
        model = toc.OrtModule(artifacts, engine=engine)
        model(TOKENS, LABELS).backward()
        for name, value in expected.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad, value.grad, rtol=1e-5, atol=1e-7)
    official = Official(artifacts, tmp_path)
    official.loss(TOKENS, LABELS)
    gradients = dict(official.gradients())
    torch.testing.assert_close(torch.from_numpy(gradients["embedding.weight"]), expected.embedding.weight.grad, rtol=1e-5, atol=1e-7)


def test_one_weight_with_two_padding_rows(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Embedding(10, 6, padding_idx=1), nn.Embedding(10, 6)
            self.second.weight = self.first.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return (self.first(tokens) + self.second(tokens)).mean(1)

    with pytest.raises(toc.CheckpointError, match=r"first\.weight: .*padding_idx"):
        toc.export_artifacts(Two(), (TOKENS,), tmp_path, exporter="torchscript")
