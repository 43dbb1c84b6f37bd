"""`torch.save` files: every usual layout is read, nothing in them is executed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.models import trained
from tests.traps import Trap

from ..truth import Truth


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".pth"])
@pytest.mark.parametrize("legacy", [False, True])
def test_bare_state_dicts_load(suffix: str, legacy: bool, tmp_path: Path) -> None:
    model, _ = trained()
    path = tmp_path / f"model{suffix}"
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=not legacy)
    assert toc.detect(path) == "torch"
    assert toc.load(path) == toc.from_torch(model.state_dict())


@pytest.mark.parametrize(
    ("model_key", "optimizer_key", "wrap"),
    [("model", "optimizer", False), ("model_state_dict", "optimizer_state_dict", False), ("state_dict", "optimizer_states", True)],
    ids=["model", "state_dict", "lightning"],
)
def test_training_checkpoints_load_with_their_moments(model_key: str, optimizer_key: str, wrap: bool, tmp_path: Path) -> None:
    model, optimizer = trained()
    state_dict = optimizer.state_dict()
    content: dict[str, Any] = {model_key: model.state_dict(), optimizer_key: [state_dict] if wrap else state_dict, "epoch": 3, "loss": 0.5}
    torch.save(content, tmp_path / "run.ckpt")
    state = toc.load(tmp_path / "run.ckpt")
    assert state.optimizer == toc.from_torch(model, optimizer).optimizer
    assert state.properties == {"epoch": 3, "loss": 0.5}


def test_moments_without_certain_names_are_left_out_with_a_warning(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": {**model.state_dict(), "extra": torch.zeros(1)}, "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    with pytest.warns(toc.CheckpointWarning, match="left out"):
        assert not toc.load(tmp_path / "run.pt").optimizer


@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_is_executed(legacy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.zeros(1), "x": Trap("pwned")}, "evil.pt", _use_new_zipfile_serialization=not legacy)
    Path("plain.pt").write_bytes(pickle.dumps(Trap("pwned")))
    for name in ("evil.pt", "plain.pt"):
        with pytest.raises(toc.CheckpointError):
            toc.load(name)
    assert not Path("pwned").exists()


def test_loading_maps_the_file(tmp_path: Path) -> None:
    model, optimizer = trained()
    toc.save(toc.from_torch(model, optimizer), tmp_path / "run.pt", format="torch")
    before = (tmp_path / "run.pt").read_bytes()
    state = toc.load(tmp_path / "run.pt")
    state.trainable["0.weight"].zero_()
    assert (tmp_path / "run.pt").read_bytes() == before


def test_a_plain_loop_can_load_what_we_write(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = toc.from_torch(model, optimizer, properties={"epoch": 3})
    toc.save(state, tmp_path / "full.pt", format="torch")
    nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).load_state_dict(torch.load(tmp_path / "full.pt")["state_dict"])
    with pytest.raises(toc.CheckpointError, match="no optimizer state"):
        toc.save(state, tmp_path / "bare.pt", format="torch", bare=True)
    with pytest.warns(toc.CheckpointWarning, match="left out: properties"):
        toc.save(state, tmp_path / "bare.pt", format="torch", bare=True, include_optimizer=False)
    assert torch.load(tmp_path / "bare.pt").keys() == model.state_dict().keys()


def test_a_view_does_not_drag_its_storage_along(tmp_path: Path) -> None:
    toc.save(toc.CheckpointState({"w": torch.zeros(1_000_000)[:3]}), tmp_path / "w.pt", format="torch")
    assert (tmp_path / "w.pt").stat().st_size < 10_000


def test_nominal_states_fit(tmp_path: Path) -> None:
    state = toc.load(Truth("fbv2_ort1_19_2_nominal").checkpoint)
    toc.save(state, tmp_path / "n.pt", format="torch")
    assert toc.load(tmp_path / "n.pt") == state


@pytest.mark.parametrize("content", [b"", b"\x80", b"PK\x03\x04", bytes(range(64))])
def test_bad_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(toc.CheckpointError, match=r"x\.pt"):
        toc.load(tmp_path / "x.pt")
    with pytest.raises(toc.CheckpointError, match=r"x\.pt"):
        toc.load(tmp_path / "x.pt", format="torch")


@pytest.mark.parametrize("content", [[1], {"a": 3}, {"model": {"a": "x"}}, torch.zeros(1)])
def test_other_contents_are_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(toc.CheckpointError, match="state dict"):
        toc.load(tmp_path / "x.pt")
