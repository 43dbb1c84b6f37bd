"""A nominal state has names and types, but no values: everything that needs values refuses it, and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.truth import Truth

STATE = toc.load(Truth("fbv2_ort1_19_2_nominal").checkpoint)
COMPLETE = toc.CheckpointState({name: torch.ones(2) for name in STATE.trainable})
assert STATE.nominal


def saved(**options: Any) -> Callable[[Path], Any]:
    return lambda path: toc.save(STATE, path, **options)


REFUSED: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "split": (lambda _: toc.split(STATE, {"data_parallel_size": 2}), "nominal state has nothing to cut", "Complete it first"),
    "merge": (lambda _: toc.merge([STATE]), "is nominal: it has no data", "give it weights"),
    "average, first": (lambda _: toc.average([STATE, COMPLETE]), "nominal checkpoint has no values to average", "Leave it out"),
    "average, second": (lambda _: toc.average([COMPLETE, STATE]), "nominal checkpoint has no values|unlike the first", ""),
    "dcp": (saved(format="dcp"), "nominal state has no data to write", "Complete it first"),
    "safetensors": (saved(format="safetensors"), "nominal state has no data to write", "Complete it first"),
    "pbseq": (saved(format="pbseq"), "no nominal checkpoints", "Complete the state first"),
    "runner": (saved(format="runner"), "no nominal checkpoints", "Complete the state first"),
    "ortcp": (saved(format="ortcp"), "no nominal checkpoints", "Complete the state first"),
    "a bare state dict": (saved(format="torch", bare=True), "can't say that it is nominal", "Complete it first"),
    "a sidecar": (saved(format="ort", external_data=True), "nominal checkpoint has no data to put elsewhere", ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_nominal_state_is_refused(case: str, tmp_path: Path) -> None:
    action, message, remedy = REFUSED[case]
    with pytest.raises(toc.CheckpointError, match=message) as caught:
        action(tmp_path / "checkpoint")
    assert remedy in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_where_it_is_not_refused_it_stays_nominal(tmp_path: Path) -> None:
    for number, options in enumerate(({"format": "ort"}, {"format": "torch"})):
        toc.save(STATE, tmp_path / str(number), **options)
        assert toc.load(tmp_path / str(number)) == STATE
