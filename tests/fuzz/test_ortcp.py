"""Mutants of ORTTrainer's HDF5 files: single ones, rank sets, and what newer libraries write."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest

import torch_ort_ckpt as toc

from ..truth import Truth, fixtures
from .codecs import HDF5
from .mutate import PARTS, Sample, Spot, files_per_part, run, sample

MAGICS = (b"TREE", b"SNOD", b"HEAP", b"GCOL", b"OHDR", b"FRHP", b"BTHD")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    found = []
    for name in fixtures("ortcp"):
        truth = Truth(name)
        if isinstance(truth.json["checkpoint"], str):
            found.append(sample(truth.checkpoint, spots, HDF5))
        else:
            files = {file: (truth.folder / file).read_bytes() for file in truth.json["checkpoint"]}
            found.append(Sample(name, files, ".", {file: spots(content) for file, content in files.items()}, (HDF5,)))
    ours = tmp_path_factory.mktemp("ours")
    state = toc.load(Truth("ortcp_ort1_12_0_adam").checkpoint)
    state.properties["third"] = 1 / 3
    state.trainable["имя"] = state.trainable.pop("fc1.weight")
    toc.save(state, ours / "a.ortcp", format="ortcp")
    with h5py.File(ours / "b.ortcp", "w", libver="latest") as new, h5py.File(ours / "a.ortcp") as old:
        for key in old:
            old.copy(key, new)
    return [*found, sample(ours / "a.ortcp", spots, HDF5), sample(ours / "b.ortcp", spots, HDF5)]


@pytest.mark.parametrize("part", range(PARTS))
def test_mutants_load_or_are_refused(part: int, samples: list[Sample], tmp_path: Path) -> None:
    report = run(samples, tmp_path, seed=part, files=files_per_part(1000), format="ortcp")
    print(report)
    assert report.loaded > report.files // 20
    assert sum(report.refused.values()) > report.files // 4


def spots(data: bytes) -> list[Spot]:
    """The superblock's numbers, those that follow the marks of HDF5's structures, and every aligned number that could be an address."""
    found = [Spot(place, 1) for place in range(8, 16)]
    for magic in MAGICS:
        place = data.find(magic)
        while place >= 0:
            found += [
                Spot(place + 4, 1),
                Spot(place + 5, 1),
                Spot(place + 6, 2),
                Spot(place + 8, 8),
                Spot(place + 16, 8),
                Spot(place + 24, 8),
            ]
            place = data.find(magic, place + 1)
    for place in range(16, len(data) - 8, 8):
        if 0 < int.from_bytes(data[place : place + 8], "little") <= len(data) + 64:
            found.append(Spot(place, 8))
    return found
