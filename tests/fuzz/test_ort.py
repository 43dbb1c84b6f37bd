"""Mutants of every flatbuffer checkpoint: those that ORT wrote, and those that we write."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc

from ..truth import Truth, fixtures
from .codecs import FLATBUFFER, SCHEMA
from .mutate import PARTS, Sample, Spot, files_per_part, run, sample

SIZES = {"int32": 4, "float32": 4, "int64": 8, "bool": 1}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    found = [sample(Truth(name).checkpoint, spots, FLATBUFFER) for name in fixtures("fbv")]
    ours = tmp_path_factory.mktemp("ours")
    for name in ("fbv2_ort1_19_2_adamw_full", "fbv2_ort1_19_2_strings", "fbv2_ort1_19_2_dtypes"):
        state = toc.load(Truth(name).checkpoint)
        masters = [(weight, value) for weight, value in state.parameters.items() if getattr(value, "dtype", None) == torch.float32]
        state.mixed_precision.update((weight, value.half()) for weight, value in masters)
        for group in state.optimizer.values():
            group.lr, group.hyperparameters = 0.02, {"betas": [0.9, 0.95]}
        state.properties["third"] = 1 / 3
        state.partitions["w"] = toc.PartitionInfo((4, 8), 1)
        for external in (False, True):
            place = ours / f"{name}-{external}"
            place.mkdir()
            toc.save(state, place / "checkpoint", include_mixed_precision=True, external_data=external)
            found.append(sample(place / "checkpoint", spots, FLATBUFFER))
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_mutants_load_or_are_refused(part: int, samples: list[Sample], tmp_path: Path) -> None:
    report = run(samples, tmp_path, seed=part, files=files_per_part(4000), format="ort", groups="keep")
    print(report)
    assert report.loaded > report.files // 20  # the mutants are near enough to real files to get past the first check
    assert sum(report.refused.values()) > report.files // 4


def test_the_spots_are_where_the_structure_is(samples: list[Sample]) -> None:
    assert all(found.spots[found.target] for found in samples)
    one = next(found for found in samples if found.name == "fbv2_ort1_19_2_adamw_full")
    assert len(one.spots["checkpoint"]) > 400
    assert max(spot.position + spot.size for spot in one.spots["checkpoint"]) <= len(one.files["checkpoint"])


def spots(data: bytes) -> list[Spot]:
    """Every vtable word, offset, count, length and number of a well-formed checkpoint; none for a sidecar."""
    found: list[Spot] = []
    if data[4:8] == b"ODTC":
        found.append(Spot(0, 4))
        _walk(data, struct.unpack_from("<I", data)[0], "Checkpoint", found)
    return sorted(set(found), key=lambda spot: (spot.position, spot.size))


def _walk(data: bytes, table: int, kind: str, found: list[Spot]) -> None:
    vtable = table - struct.unpack_from("<i", data, table)[0]
    size = struct.unpack_from("<H", data, vtable)[0]
    found.append(Spot(table, 4))
    found += [Spot(position, 2) for position in range(vtable, vtable + size, 2)]
    for number in range((size - 4) // 2):
        offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0]
        if offset:
            _value(data, table + offset, SCHEMA[kind][number], found)


def _value(data: bytes, position: int, kind: str, found: list[Spot]) -> None:
    found.append(Spot(position, SIZES.get(kind, 4)))
    if kind in SIZES:
        return
    target = position + struct.unpack_from("<I", data, position)[0]
    if kind in SCHEMA:
        _walk(data, target, kind, found)
        return
    found.append(Spot(target, 4))  # the count of a vector or string
    item = kind.strip("[]")
    if kind in ("string", "bytes"):
        found.append(Spot(target + 4, 1))
        return
    for index in range(struct.unpack_from("<I", data, target)[0]):
        _value(data, target + 4 + SIZES.get(item, 4) * index, item, found)
