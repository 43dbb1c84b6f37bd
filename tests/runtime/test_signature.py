"""`inspect.signature(model.forward)`: the graph's inputs, per instance, through copies, pickles and wrappers."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.models import batch, exported
from torch_ort_ckpt.runtime.signature import _parameters


def names(model: Any) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


def test_each_instance_shows_its_own_inputs() -> None:
    model = toc.OrtModule(exported("mlp"), engine="torch")
    assert names(model) == ["x", "labels"]
    assert all(item.kind is item.POSITIONAL_OR_KEYWORD for item in inspect.signature(model.forward).parameters.values())
    assert model.forward == model.forward
    assert model.forward.__name__ == "forward"
    assert "labels" in inspect.signature(toc.OrtModule.forward).parameters  # transformers looks in the class


def test_copies_and_pickles_keep_it_and_run_on_their_own_weights() -> None:
    model = toc.OrtModule(exported("mlp"), engine="torch")
    before = model(*batch("mlp"))
    for other in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert names(other) == ["x", "labels"]
        assert other.forward.__self__ is other
        torch.testing.assert_close(other(*batch("mlp")), before, rtol=0, atol=0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("fc2.bias").add_(torch.arange(5.0))
    assert other(*batch("mlp")) != before
    assert model(*batch("mlp")) == before


def test_a_forward_of_a_subclass_or_an_instance_wins() -> None:
    class Doubled(toc.OrtModule):
        def forward(self, pair: Any) -> Any:
            return 2 * super().forward(*pair)

    model = Doubled(exported("mlp"), engine="torch")
    assert names(model) == ["pair"]
    plain = toc.OrtModule(exported("mlp"), engine="torch")
    assert model(batch("mlp")) == 2 * plain(*batch("mlp"))
    plain.forward = lambda *inputs: "mine"  # accelerate replaces it like this
    assert plain(*batch("mlp")) == "mine"


@pytest.mark.parametrize(
    ("given", "shown", "by_position"),
    [
        (["x", "labels"], ["x", "labels"], 0),
        (["input.1", "labels"], ["input_1", "labels"], 1),
        (["x", "onnx::1", "labels"], ["x", "onnx__1", "labels"], 2),
        (["class", "1"], ["_class", "_1"], 2),
        (["a.b", "a_b", "self"], ["a_b", "a_b_", "self_"], 3),
    ],
)
def test_names_that_python_can_not_spell_are_by_position(given: list[str], shown: list[str], by_position: int) -> None:
    parameters = _parameters(given)
    assert [item.name for item in parameters] == shown
    assert sum(item.kind is item.POSITIONAL_ONLY for item in parameters) == by_position
    inspect.Signature(parameters)  # refuses a wrong order and duplicates


def test_outputs_by_name() -> None:
    artifacts = exported("mlp", extra_outputs=True)
    plain, named = toc.OrtModule(artifacts, engine="torch"), toc.OrtModule(artifacts, engine="torch", return_dict=True)
    extra = artifacts.outputs[1].name
    for training in (True, False):
        loss, logits = plain.train(training)(*batch("mlp"))
        found = named.train(training)(*batch("mlp"))
        assert list(found) == ["loss", extra]
        assert found["loss"] == loss
        assert torch.equal(found[extra], logits)
    alone = toc.OrtModule(exported("mlp"), engine="torch", return_dict=True)
    alone(*batch("mlp"))["loss"].backward()
    assert alone.get_parameter("fc2.bias").grad is not None
