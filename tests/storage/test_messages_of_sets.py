"""A failed save of several files says which state is there: the old one until the commit point of the set, the new one from then on."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.disks import failing
from torch_ort_ckpt.storage.system import is_windows

SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "pair": ("c", {"external_data": True}),
    "model and optimizer": ("c.safetensors", {}),
    "shards": ("c.safetensors", {"max_shard_size": 500}),
    "folder": ("c.runner", {}),
}


def state(value: float, moments: bool = True) -> toc.CheckpointState:
    weights = {"w": torch.full((200,), value), "v": torch.full((200,), value)}
    states = {"w": {"momentum0": torch.full((200,), value), "momentum1": torch.full((200,), value)}}
    return toc.CheckpointState(weights, optimizer={"group0": toc.OptimizerGroup(1, states=states)} if moments else {})


@pytest.mark.parametrize("kind", SETS)
def test_what_is_said_is_what_is_there(kind: str, tmp_path: Path) -> None:
    name, options = SETS[kind]
    old, new = (state(value, moments=kind != "shards") for value in (1.0, 2.0))
    said: dict[str, set[bool]] = {}
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        folder.mkdir()
        toc.save(old, folder / name, **options)
        hit: list[str] = []
        message = None
        try:
            with failing(number, errno.EIO, hit):
                toc.save(new, folder / name, **options)
        except toc.CheckpointError as error:
            message = str(error)
        if not hit:
            break
        if message is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", toc.CheckpointWarning)
            found = toc.load(folder / name)
            assert found in (old, new)
        assert ("what was there before is untouched" in message) is (found == old), message
        assert ("the new file is in place" in message or "the new checkpoint is complete" in message) is (found == new), message
        said.setdefault(hit[0], set()).add(found == new)
        if "verify --repair" in message:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", toc.CheckpointWarning)
                assert toc.verify(folder / name, repair=True).repaired
            assert toc.load(folder / name) == new  # without a warning now
    assert said["write"] == {False}
    assert said["fsync"] == ({False} if is_windows() else {False, True})  # Windows syncs no folders
    if kind == "folder":  # when the second rename fails, the first is taken back
        assert said["rename"] == {False}
    else:
        assert said["replace"] == {False, True}


def test_nothing_is_said_to_be_in_place_when_nothing_is(tmp_path: Path) -> None:
    """A part that already lies beside its place when the main file can't be put there."""
    path = tmp_path / "c.safetensors"
    path.mkdir()
    with pytest.raises(toc.CheckpointError, match="what was there before is untouched"):
        toc.save(state(1.0), path)
    assert os.listdir(tmp_path) == ["c.safetensors"]
