"""Mutants of every pbseq folder: those that ORT wrote, and one that we write."""

from __future__ import annotations

from pathlib import Path

import pytest

import torch_ort_ckpt as toc

from ..truth import Truth, fixtures
from .codecs import SEQUENCE
from .mutate import PARTS, Sample, Spot, files_per_part, run, sample


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    found = [sample(Truth(name).checkpoint, spots, SEQUENCE) for name in fixtures("pbseq")]
    state = toc.load(Truth("pbseq_ort1_15_1_adamw_full").checkpoint)
    state.optimizer["group0"].lr = 0.5
    state.optimizer["group0"].states["fc1.bias"].pop("momentum1")
    state.properties["third"] = 1 / 3
    state.partitions["fc1.bias"] = toc.PartitionInfo((32,), 0)
    ours = tmp_path_factory.mktemp("ours") / "checkpoint"
    toc.save(state, ours, format="pbseq")
    return [*found, sample(ours, spots, SEQUENCE)]


@pytest.mark.parametrize("part", range(PARTS))
def test_mutants_load_or_are_refused(part: int, samples: list[Sample], tmp_path: Path) -> None:
    report = run(samples, tmp_path, seed=part, files=files_per_part(2000), format="pbseq", groups="keep")
    print(report)
    assert report.loaded > report.files // 20
    assert sum(report.refused.values()) > report.files // 4


def spots(data: bytes) -> list[Spot]:
    """Every key and length of the sequence and of the messages in it, and the numbers that are not data."""
    found: list[Spot] = []
    count, position = _varint(data, 0, found)
    for _ in range(count):
        length, position = _varint(data, position, found)
        end = position + length
        while position < end:
            key, position = _varint(data, position, found)
            if key & 7 == 0:
                _, position = _varint(data, position, found)
            else:
                size, position = _varint(data, position, found)
                position += size
    return found


def _varint(data: bytes, position: int, found: list[Spot]) -> tuple[int, int]:
    start, value = position, 0
    while True:
        value |= (data[position] & 0x7F) << 7 * (position - start)
        position += 1
        if data[position - 1] < 0x80:
            found.append(Spot(start, position - start))
            return value, position
