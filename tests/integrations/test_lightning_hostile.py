"""Lightning's own files through `OrtCheckpointIO`: code in them runs only with weights_only=False."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.traps import Trap

pytest.importorskip("lightning")


@pytest.mark.parametrize("options", [{}, {"weights_only": None}, {"weights_only": True}])
def test_a_file_of_lightning_runs_no_code(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_ort_ckpt.integrations.lightning import OrtCheckpointIO

    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0")
    torch.save({"state_dict": {"w": torch.ones(2)}, "x": Trap(tmp_path / "sprung")}, tmp_path / "a.ckpt")
    with pytest.raises(toc.CheckpointError, match="weights_only=False"):
        OrtCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", **options)
    assert not (tmp_path / "sprung").exists()
    torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "b.ckpt")
    assert OrtCheckpointIO().load_checkpoint(str(tmp_path / "b.ckpt"), **options)["epoch"] == 3


def test_what_is_not_there_or_no_path_is_our_error(tmp_path: Path) -> None:
    from torch_ort_ckpt.integrations.lightning import OrtCheckpointIO

    (tmp_path / "damaged").write_bytes(b"PK\x03\x04" + bytes(100))
    (tmp_path / "empty").write_bytes(b"")
    for value in (tmp_path / "nothing", tmp_path / "damaged", tmp_path / "empty", b"x", None, 5):
        with pytest.raises(toc.CheckpointError):
            OrtCheckpointIO().load_checkpoint(value)


def test_who_trusts_a_file_can_say_so(tmp_path: Path) -> None:
    from torch_ort_ckpt.integrations.lightning import OrtCheckpointIO

    torch.save({"state_dict": {}, "x": Trap(tmp_path / "made")}, tmp_path / "a.ckpt")
    OrtCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("format", "options"),
    [("ort", {"external_data": True}), ("safetensors", {}), ("safetensors", {"max_shard_size": 32})],
)
def test_a_checkpoint_that_is_no_longer_kept_goes_with_all_its_files(format: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Also from a rank that is not the first: there nothing happens. Files of other checkpoints stay."""
    from torch_ort_ckpt.integrations.lightning import OrtCheckpoint

    state = toc.CheckpointState(trainable={"a": torch.ones(8), "b": torch.zeros(8)})
    for name in ("old", "new"):
        toc.save(state, tmp_path / f"{name}.{format}", format=format, **options)
    before = sorted(place.name for place in tmp_path.iterdir())
    callback = OrtCheckpoint(tmp_path, format=format)
    callback._remove_checkpoint(SimpleNamespace(is_global_zero=False), str(tmp_path / f"old.{format}"))
    assert sorted(place.name for place in tmp_path.iterdir()) == before
    callback._remove_checkpoint(SimpleNamespace(is_global_zero=True), str(tmp_path / f"old.{format}"))
    assert sorted(place.name for place in tmp_path.iterdir()) == [name for name in before if name.startswith("new")]
    assert toc.load(tmp_path / f"new.{format}") == state


@pytest.mark.parametrize("counted", [{"epoch": 3, "global_step": 40}, {"epoch": 3}, {}])
def test_what_lightning_counts_is_in_the_checkpoint(counted: dict[str, int], tmp_path: Path) -> None:
    from torch_ort_ckpt.integrations.lightning import OrtCheckpointIO

    OrtCheckpointIO().save_checkpoint({"state_dict": {"w": torch.ones(2)}, **counted}, tmp_path / "a.ckpt")
    assert toc.load(tmp_path / "a.ckpt" / "checkpoint").properties == counted
