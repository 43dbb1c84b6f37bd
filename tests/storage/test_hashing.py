"""The hash behind checksums and identities."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash

import torch_ort_ckpt as toc
from torch_ort_ckpt.storage.hashing import Hasher, bytes_hash, file_hash


def test_it_is_xxh3_of_128_bits() -> None:
    assert bytes_hash(b"") == "99aa06d3014798d86001c324468d497f"  # the reference implementation's
    assert bytes_hash(b"abc") == xxhash.xxh3_128_hexdigest(b"abc")


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (3 << 20) + 7])
def test_a_file_in_chunks_is_the_same_as_its_bytes(size: int, tmp_path: Path) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)).numpy().tobytes()
    path = tmp_path / "file"
    path.write_bytes(data)
    assert file_hash(path) == bytes_hash(data)
    hasher = Hasher(data[:100])
    hasher.update(data[100:])
    assert hasher.hex() == bytes_hash(data)


@pytest.mark.parametrize(
    "value",
    [torch.arange(24.0).reshape(4, 6).T, torch.tensor(3), torch.empty(0, 2), torch.ones(3, dtype=torch.bfloat16), torch.ones(1).expand(5)],
)
def test_a_tensor_counts_as_its_elements_in_order(value: torch.Tensor) -> None:
    hasher = Hasher()
    hasher.update_tensor(value)
    data = value.contiguous().clone().reshape(-1)
    assert hasher.hex() == bytes_hash(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")


def test_words_that_changed_places_are_noticed() -> None:
    data = bytes(range(256)) * 64
    words = [data[start : start + 8] for start in range(0, len(data), 8)]
    words[3], words[700] = words[700], words[3]
    assert bytes_hash(b"".join(words)) != bytes_hash(data)


def test_what_can_not_be_read_is_our_error(tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match="no such file"):
        file_hash(tmp_path / "absent")
    with pytest.raises(toc.CheckpointError, match="not a regular file"):
        file_hash(tmp_path)
