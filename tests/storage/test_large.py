"""Beyond 2 GiB, where ORT's own writer stops. Runs in `tox -e soak`: it needs 8 GB of memory and of disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc

GIB = 1 << 28  # float32 elements of one GiB


@pytest.mark.soak
@pytest.mark.ort
def test_ort_reads_more_than_2_gib_of_moments(tmp_path: Path) -> None:
    from onnxruntime.training.api import CheckpointState

    generator = torch.Generator().manual_seed(0)
    state = toc.CheckpointState({"w": torch.rand(GIB + 3, generator=generator)})
    moments = {name: torch.rand(GIB + 3, generator=generator) for name in ("momentum0", "momentum1")}
    state.optimizer["group0"] = toc.OptimizerGroup(step=5, states={"w": moments})
    toc.save(state, tmp_path / "large")
    assert (tmp_path / "large.data").stat().st_size > 3 << 30
    assert toc.load(tmp_path / "large") == state
    theirs = CheckpointState.load_checkpoint(tmp_path / "large")
    assert torch.equal(torch.from_numpy(theirs.parameters["w"].data), state.trainable["w"])
    with pytest.raises(toc.CheckpointError, match="more than the 2 GiB ORT can read"):
        toc.save(state, tmp_path / "inline", external_data=False)
