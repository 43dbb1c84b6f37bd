"""`convert` reads back what it wrote, into every format; what the disk gave back must be what was sent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import torch_ort_ckpt as toc
from tests.disks import VARIANTS, place, state, write_model

pytestmark = pytest.mark.filterwarnings("ignore::torch_ort_ckpt.CheckpointWarning")


@pytest.mark.parametrize("variant", VARIANTS)
def test_to_every_format(variant: str, tmp_path: Path) -> None:
    source, target = state(variant, 0, 3000), place(tmp_path, variant)
    toc.save(source, tmp_path / "source")
    if VARIANTS[variant]["format"] == "onnx":
        write_model(target, state(variant, 1, 3000))
    options = {key: value for key, value in VARIANTS[variant].items() if key != "format"}
    toc.convert(tmp_path / "source", target, to_format=VARIANTS[variant]["format"], overwrite=True, **options)
    assert toc.load(target) == source


@pytest.mark.parametrize("name", ["c", "c.pbseq", "c.runner", "c.safetensors"])
def test_a_disk_that_gives_back_something_else_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toc.save(state("ort", 0, 3000), tmp_path / "source")
    real = os.write

    def flip(descriptor: int, data: memoryview) -> int:
        damaged = bytearray(data)
        if len(damaged) == 12000:  # a tensor
            damaged[5000] ^= 1
        return real(descriptor, damaged)

    monkeypatch.setattr(os, "write", flip)
    with pytest.raises(toc.CheckpointError, match="what was read back is not what was written"):
        toc.convert(tmp_path / "source", tmp_path / name)
