"""The flatbuffer format against files that real ORT releases wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

import torch_ort_ckpt as toc

from ..truth import Truth, fixtures


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", fixtures("fbv"))
def test_every_fixture_equals_its_truth(name: str, mmap: bool) -> None:
    truth = Truth(name)
    state = toc.load(truth.checkpoint, mmap=mmap)
    truth.assert_equal(state)
    assert state.format_version == int(name[3])
    assert state.nominal == truth.json["is_nominal"]


@pytest.mark.parametrize("options", [{}, {"external_data": True}, {"version": 1}], ids=["inline", "external", "v1"])
@pytest.mark.parametrize("name", [name for name in fixtures("fbv") if "nominal" not in name])
def test_every_fixture_survives_a_round_trip(name: str, options: dict[str, object], tmp_path: Path) -> None:
    state = toc.load(Truth(name).checkpoint)
    toc.save(state, tmp_path / "checkpoint", **options)
    again = toc.load(tmp_path / "checkpoint")
    assert again == state
    Truth(name).assert_equal(again)
