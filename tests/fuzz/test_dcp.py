"""Mutants of the folders of `torch.distributed.checkpoint`: the index is a pickle, the data are files of `torch.save`."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import torch_ort_ckpt as toc

from .codecs import PICKLE, decode_pickle, encode_pickle
from .mutate import PARTS, Sample, Spot, files_per_part, run, sample
from .test_containers import STATES, rich

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch remarks that one process uses it


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    folder = tmp_path_factory.mktemp("ours")
    found = []
    for name in STATES:
        place = folder / name / "checkpoint"
        place.parent.mkdir()
        toc.save(rich(name), place, format="dcp", include_mixed_precision=True)
        found.append(sample(place, spots, PICKLE))
    foreign = {"model.w": torch.ones(4, 3), "optim.state.w.exp_avg": torch.ones(4, 3), "optim.state.w.step": torch.tensor(3.0), "epoch": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(foreign, storage_writer=FileSystemWriter(folder / "foreign" / "checkpoint"), no_dist=True)
    return [*found, sample(folder / "foreign" / "checkpoint", spots, PICKLE)]


def spots(data: bytes) -> list[Spot]:
    """Every byte of the index; the start of each archive in a data file."""
    if data[:2] == b"\x80\x04" or data[:2] == b"\x80\x02":
        return [Spot(place, 1) for place in range(2, len(data))]
    return [Spot(place, 1) for place in range(len(data) - 3) if data[place : place + 2] == b"PK"]


@pytest.mark.parametrize("part", range(PARTS))
def test_mutants_load_or_are_refused(part: int, samples: list[Sample], tmp_path: Path) -> None:
    report = run(samples, tmp_path, seed=part, files=files_per_part(200), format="dcp", checksums=True)
    print(report)
    assert report.loaded or report.files < 500
    assert sum(report.refused.values()) > report.files // 4


def test_an_index_is_put_together_again(samples: list[Sample], tmp_path: Path) -> None:
    """Decoded and encoded without a change, a folder reads as before: mutants differ only in what was mutated."""
    for number, one in enumerate(samples):
        place = tmp_path / str(number)
        place.mkdir()
        for name, content in one.files.items():
            (place / name).write_bytes(encode_pickle(decode_pickle(content)) if name == ".metadata" else content)
        assert toc.load(place).parameters
