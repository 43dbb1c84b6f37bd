"""Functions may be called from several threads, also on one path."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc


@pytest.mark.parametrize("external", [False, True])
def test_threads_that_save_to_one_path(external: bool, tmp_path: Path) -> None:
    def save(number: int) -> None:
        state = toc.CheckpointState(trainable={"w": torch.full((64,), float(number))}, properties={"number": number})
        toc.save(state, tmp_path / "checkpoint", external_data=external, durable=False)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(16)))
    last = toc.load(tmp_path / "checkpoint")
    assert torch.equal(last.trainable["w"], torch.full((64,), float(last.properties["number"])))
    assert {place.name for place in tmp_path.iterdir()} == {"checkpoint", *(["checkpoint.data"] if external else [])}
