"""Tensors are compared with the file while they are written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from torch_ort_ckpt.storage.files import create_file, write_tensor
from torch_ort_ckpt.storage.read_back import PIECE, active_reader, reading_back

pytestmark = pytest.mark.skipif(not hasattr(os, "preadv"), reason="needs preadv")


def test_what_is_written_in_the_block_is_compared(tmp_path: Path) -> None:
    inside, outside = torch.arange(PIECE, dtype=torch.int32), torch.ones(3)
    with create_file(tmp_path / "a") as file:
        with reading_back() as reader:
            write_tensor(file, inside)
        write_tensor(file, outside)
    assert reader is not None
    assert not reader.damaged
    assert inside in reader
    assert outside not in reader
    assert inside.view(torch.float32) not in reader
    assert active_reader() is None


def test_a_changed_byte_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        changed = bytearray(data)
        changed[-1] ^= 1
        return real(descriptor, changed)

    monkeypatch.setattr(os, "write", write)
    with create_file(tmp_path / "a") as file, reading_back() as reader:
        write_tensor(file, torch.ones(5))
    assert reader is not None
    assert reader.damaged
