"""`load(save(state))` is the state, bit for bit, in every writable format and through every pair of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_ort_ckpt as toc

from ..strategies import states

WRITABLE: dict[str, dict[str, Any]] = {
    "ort": {"format": "ort"},
    "ort-external": {"format": "ort", "external_data": True},
    "ort-v1": {"format": "ort", "version": 1},
    "safetensors": {"format": "safetensors"},
    "safetensors-sharded": {"format": "safetensors", "max_shard_size": 64},
    "torch": {"format": "torch"},
}
checked = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def through(state: toc.CheckpointState, folder: str, name: str, mmap: bool = True) -> toc.CheckpointState:
    path = Path(folder) / name
    toc.save(state, path, include_mixed_precision=True, durable=False, **WRITABLE[name])
    assert toc.detect(path) == WRITABLE[name]["format"]
    return toc.load(path, mmap=mmap)


@pytest.mark.parametrize("name", WRITABLE)
@given(state=states(), mmap=st.booleans())
@checked
def test_a_state_survives_each_format(name: str, state: toc.CheckpointState, mmap: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert through(state, folder, name, mmap) == state


@pytest.mark.parametrize("name", ["safetensors", "safetensors-sharded", "torch"])
@given(state=states(several_groups=True))
@checked
def test_several_groups_survive_where_the_format_has_them(name: str, state: toc.CheckpointState) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert through(state, folder, name) == state


@pytest.mark.parametrize("first", WRITABLE)
@pytest.mark.parametrize("second", WRITABLE)
@given(state=states())
@settings(checked, max_examples=8)
def test_a_state_survives_every_pair_of_formats(first: str, second: str, state: toc.CheckpointState) -> None:
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        assert through(through(state, a, first), b, second) == state


@pytest.mark.parametrize("name", [name for name in WRITABLE if name != "torch"])  # torch.save numbers its records by memory
@given(state=states())
@settings(checked, max_examples=20)
def test_equal_states_give_equal_bytes(name: str, state: toc.CheckpointState) -> None:
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        through(state, a, name)
        through(state.clone(), b, name)
        files = sorted(place.relative_to(a) for place in Path(a).rglob("*") if place.is_file())
        assert files == sorted(place.relative_to(b) for place in Path(b).rglob("*") if place.is_file())
        assert all((Path(a) / place).read_bytes() == (Path(b) / place).read_bytes() for place in files)
