"""`torch.compile(OrtModule)`: the ort engine is one graph break, without warnings and without compiling again at each step."""

from __future__ import annotations

import warnings

import pytest
import torch

import torch_ort_ckpt as toc
from tests.models import batch, exported


@pytest.mark.ort
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_ort_engine_breaks_the_graph_once(caplog: pytest.LogCaptureFixture) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, plain = (toc.OrtModule(exported("mlp"), engine="ort") for _ in range(2))
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for step in range(12):
            inputs = batch("mlp", size=2 + step, seed=step)
            loss = compiled(*inputs)
            loss.backward()
            expected = plain(*inputs)
            expected.backward()
            assert loss.item() == expected.item()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert counters["frames"]["total"] <= 8  # 207 when it traced the session; the number does not grow with the steps
    assert not [record for record in caplog.records if "recompile_limit" in record.getMessage()]
