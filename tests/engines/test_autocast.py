"""`torch.autocast` and engine "ort", which can't follow it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.models import batch, exported

pytestmark = pytest.mark.ort

CALLS: dict[str, Any] = {
    "forward": lambda model, *inputs: model.train()(*inputs),
    "eval": lambda model, *inputs: model.eval()(*inputs),
    "train_step": lambda model, *inputs: model.train().train_step(*inputs),
}


@pytest.mark.parametrize("how", CALLS)
def test_engine_ort_says_once_that_autocast_has_no_effect(how: str) -> None:
    model = toc.OrtModule(exported("mlp"), engine="ort", threads=1)
    expected = CALLS[how](model, *batch("mlp"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.warns(toc.CheckpointWarning, match='autocast has no effect on engine "ort".*engine="torch"'):
            found = CALLS[how](model, *batch("mlp"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for again in CALLS:
                CALLS[again](model, *batch("mlp"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_no_word_where_autocast_is_off_or_for_another_device() -> None:
    model = toc.OrtModule(exported("mlp"), engine="ort", threads=1)
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=torch.cuda.is_available()):
        model(*batch("mlp"))
