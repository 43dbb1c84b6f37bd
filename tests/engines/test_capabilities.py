"""What an engine can do is in its attributes, which `OrtModule` and `OrtOptimizer` go by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.models import batch, exported

pytestmark = pytest.mark.ort  # the artifacts are made by it


@pytest.mark.parametrize("engine", ["ort", "torch"])
def test_the_optimizer_goes_by_the_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toc.OrtModule(exported("mlp"), engine=engine, threads=1)
    assert model.engine.runs_optimizer_graph is (engine == "ort")
    assert toc.OrtOptimizer(model).fused is (engine == "torch")
    monkeypatch.setattr(model.engine, "runs_optimizer_graph", engine == "torch")
    assert toc.OrtOptimizer(model).fused is (engine == "ort")


def test_parameters_are_adjacent_where_the_engine_prefers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_ort_ckpt.engines.ort.engine import OrtEngine
    from torch_ort_ckpt.engines.ort.memory import pieces

    def joined() -> int:
        model = toc.OrtModule(exported("transformer"), engine="ort", threads=1)
        values = list(model.named_trainable().values())
        return len(pieces([[value.data_ptr() for value in values]], [value.numel() for value in values], join=True)[0])

    together, made = joined(), OrtEngine.__init__

    def without(self: Any, *args: Any) -> None:
        made(self, *args)
        self.prefers_adjacent_parameters = False

    monkeypatch.setattr(OrtEngine, "__init__", without)
    assert together < joined()


@pytest.mark.parametrize("engine", ["ort", "torch"])
def test_a_step_may_reuse_the_gradients_of_an_earlier_one(engine: str) -> None:
    model = toc.OrtModule(exported("mlp"), engine=engine, threads=1)
    tensors, inputs = model._table.current(training=True), list(batch("mlp"))
    _, first = model.engine.step(inputs, tensors, None)
    in_use, expected = list(first), [gradient.clone() for gradient in first]
    _, other = model.engine.step(inputs, tensors, None)
    assert not {value.data_ptr() for value in other} & {value.data_ptr() for value in in_use}
    _, second = model.engine.step(inputs, tensors, None, reuse=first)
    assert (second is first) == (engine == "ort")
    for value, right in zip(second, expected, strict=True):
        torch.testing.assert_close(value, right, rtol=0, atol=0)


class Wrapper(nn.Module):
    """A module around the module, as Lightning Fabric and others make it."""

    def __init__(self, inner: nn.Module, other: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.other = inner, other


def test_an_optimizer_finds_the_graph_in_a_wrapper_without_parameters_of_its_own() -> None:
    model = toc.OrtModule(exported("mlp"), engine="torch")
    for wrapped in (Wrapper(model), nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert toc.OrtOptimizer(wrapped).model is model
    twin = toc.OrtModule(exported("mlp"), engine="torch")
    for refused in (Wrapper(model, nn.Linear(2, 2)), Wrapper(model, twin), nn.Linear(2, 2)):
        with pytest.raises(toc.CheckpointError, match="expected an OrtModule"):
            toc.OrtOptimizer(refused)
