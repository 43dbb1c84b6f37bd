"""The zoo's own tools: the models train in PyTorch, and a wrong number is found. The zoo itself is `tox -e zoo`."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch

from . import dense_images, graph_nets, phones, small_text_and_tables, time_series
from .check import Known
from .entry import Entry
from .models import prove
from .native import Answer, answer
from .run import STAGES, summary
from .table import ENTRIES

_NEEDS_PACKAGE = ("lora_llama", "lora_distilbert", "patchtst", "patchtsmixer")
_OURS = [*phones.ENTRIES, *dense_images.ENTRIES, *small_text_and_tables.ENTRIES, *time_series.ENTRIES, *graph_nets.ENTRIES]
_QUICK = [entry for entry in _OURS if entry.name not in _NEEDS_PACKAGE or importlib.util.find_spec("transformers")]


@pytest.mark.parametrize("entry", _QUICK, ids=lambda entry: entry.name)
def test_pytorch_trains_each_model_at_every_size(entry: Entry) -> None:
    prove(entry)


def test_there_are_at_least_ninety_of_six_fields_with_different_names() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES) >= 90
    assert {entry.field for entry in ENTRIES} == {"text", "vision", "audio", "series", "graphs", "tables"}


@pytest.fixture
def known() -> Known:
    entry = next(entry for entry in phones.ENTRIES if entry.name == "mobilenet_v3_style")
    module, batch = entry.module(), entry.example(4)
    exact = answer(entry, copy.deepcopy(module).double(), {"x": batch[0]["x"].double()}, batch[1])
    return Known(batch, answer(entry, module, *batch), exact)


def _changed(known: Known, **parts: object) -> Answer:
    return Answer(**{"loss": known.native.loss, "gradients": known.native.gradients, "buffers": known.native.buffers, **parts})


def test_equal_numbers_are_right(known: Known) -> None:
    assert known.compare(lambda inputs, targets: known.native) == ""


def test_a_wrong_loss_is_found(known: Known) -> None:
    assert "loss" in known.compare(lambda inputs, targets: _changed(known, loss=known.native.loss + 1e-4))


def test_a_gradient_that_is_a_thousandth_off_is_found(known: Known) -> None:
    gradients = dict(known.native.gradients)
    gradients["fc.weight"] = gradients["fc.weight"] * 1.001
    assert "fc.weight" in known.compare(lambda inputs, targets: _changed(known, gradients=gradients))


def test_a_missing_gradient_is_found(known: Known) -> None:
    gradients = {name: value for name, value in known.native.gradients.items() if name != "fc.bias"}
    assert "no gradient of fc.bias" in known.compare(lambda inputs, targets: _changed(known, gradients=gradients))


def test_gradients_that_are_not_numbers_are_found(known: Known) -> None:
    gradients = {name: torch.full_like(value, float("nan")) for name, value in known.native.gradients.items()}
    assert "is off" in known.compare(lambda inputs, targets: _changed(known, gradients=gradients))


def test_wrong_batch_norm_statistics_are_found(known: Known) -> None:
    name = "body.0.1.running_var"
    buffers = {**known.native.buffers, name: known.native.buffers[name] * 1.01}
    assert name in known.compare(lambda inputs, targets: _changed(known, buffers=buffers))


def test_the_summary_counts_and_lists_by_operator() -> None:
    good = {"name": "a", "field": "text", **dict.fromkeys(STAGES, "ok")}
    bad = {"name": "b", "field": "text", "export": "UnsupportedError: no translation", "operator": "aten.fold"}
    wrong = {**good, "name": "c", "ort": "wrong: the loss is 1, not 2"}
    text = summary([good, bad, wrong])
    assert "export         2 of 3" in text
    assert "ort            1 of 2, 1 wrong" in text
    assert "aten.fold: b" in text
