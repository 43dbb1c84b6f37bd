"""What notebooks show of a state: a well-formed table in which names from files are text."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import torch

from torch_ort_ckpt import CheckpointState, OptimizerGroup
from torch_ort_ckpt.checkpoint.notebook import MAX_ROWS, html_table

EVIL = "<script>alert('x')</script>&\x1b[31m"


def cells(text: str) -> list[list[str]]:
    """The text of every row's cells; fails for markup that is not well-formed."""
    return [["".join(cell.itertext()) for cell in row] for row in ElementTree.fromstring(text).iter("tr")]


def test_a_state_shows_its_parameters() -> None:
    words = np.array(["a", "bc"], dtype=object)
    state = CheckpointState({"w": torch.zeros(2, 3)}, {"b": torch.tensor(1, dtype=torch.int64), "s": words})
    text = state._repr_html_()
    assert cells(text) == [
        ["name", "kind", "dtype", "shape", "size"],
        ["w", "trainable", "float32", "(2, 3)", "24 B"],
        ["b", "frozen", "int64", "()", "8 B"],
        ["s", "frozen", "string", "(2,)", "3 B"],
    ]
    assert ElementTree.fromstring(text).findtext("caption") == repr(state)


def test_names_from_files_are_escaped() -> None:
    state = CheckpointState({EVIL: torch.zeros(1)}, optimizer={EVIL: OptimizerGroup()})
    text = state._repr_html_()
    assert "<script" not in text
    assert "\x1b" not in text
    assert cells(text)[1][0] == "<script>alert('x')</script>&\\x1b[31m"
    assert cells(html_table(EVIL, [EVIL], [[EVIL]]))[0] == cells(text)[1][:1]


def test_a_long_table_is_cut_short() -> None:
    rows = [(str(n), n) for n in range(MAX_ROWS + 2)]
    assert len(cells(html_table("", ("a", "b"), rows[:MAX_ROWS]))) == 1 + MAX_ROWS
    found = cells(html_table("", ("a", "b"), rows))
    assert found[-2:] == [[str(MAX_ROWS - 1)] * 2, ["and 2 more"]]


def test_nominal_and_empty_states() -> None:
    assert cells(CheckpointState()._repr_html_()) == []
    nominal = CheckpointState({"w": torch.empty((), device="meta")}, nominal=True)
    assert cells(nominal._repr_html_())[1] == ["w", "trainable", "float32", "()", "0 B"]
