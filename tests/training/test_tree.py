"""Nested state as JSON and tensors: decoding gives the same, and what is in the ORT checkpoint is not stored twice."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_ort_ckpt as toc
from torch_ort_ckpt.training import tree

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
nested = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.lists(inner).map(tuple) | st.sets(st.integers()),
    max_leaves=20,
)


def through(value: Any, state: toc.CheckpointState | None = None) -> Any:
    form, tensors = tree.encode(value, tree.labels(state) if state is not None else {})
    return tree.decode(json.loads(json.dumps(form)), tensors, state, Path("x.json"))


@given(nested)
def test_plain_data_survives(value: Any) -> None:
    assert through(value) == value


def test_tensors_arrays_and_the_rest_survive() -> None:
    value = {
        "t": torch.arange(3),
        "a": np.arange(4.0),
        "n": np.float64(0.5),
        "c": Counter({3: 2}),
        "o": OrderedDict(b=1, a=2),
        "d": torch.bfloat16,
        "v": torch.device("cpu"),
        "i": float("inf"),
    }
    found = through(value)
    assert torch.equal(found["t"], value["t"])
    assert np.array_equal(found["a"], value["a"])
    assert (found["n"], found["d"], found["v"], found["i"]) == (0.5, torch.bfloat16, torch.device("cpu"), float("inf"))
    assert found["c"] == value["c"]
    assert isinstance(found["c"], Counter)
    assert list(found["o"].items()) == [("b", 1), ("a", 2)]


def test_what_the_checkpoint_has_is_a_reference() -> None:
    weight = torch.ones(4)
    state = toc.CheckpointState({"w": weight})
    form, tensors = tree.encode({"again": weight, "part": weight[:2]}, tree.labels(state))
    assert form["again"] == {"$ort": "trainable/w"}
    assert list(tensors) == ["/part"]
    assert through({"again": weight}, state)["again"] is weight


@pytest.mark.parametrize("form", [{"$ort": "trainable/x"}, {"$tensor": "y"}, {"$what": []}, {"$dict": 3}, {"$dtype": ["load"]}])
def test_a_malformed_form_is_an_error_of_the_file(form: Any) -> None:
    with pytest.raises(toc.CheckpointError, match=r"x\.json"):
        tree.decode(form, {}, None, Path("x.json"))
