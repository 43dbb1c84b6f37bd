"""Mutants of TrainingRunner's folders."""

from __future__ import annotations

from pathlib import Path

import pytest

import torch_ort_ckpt as toc

from ..truth import Truth, fixtures
from .codecs import SEQUENCE
from .mutate import PARTS, Sample, Spot, files_per_part, run, sample
from .test_pbseq import spots as sequence_spots


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    found = [_sample(Truth(name).checkpoint) for name in fixtures("cpp_runner")]
    state = toc.load(Truth("cpp_runner_v1_8_1_lamb_mixed").checkpoint)
    state.optimizer["group0"].lr = 0.5
    state.properties["third"] = 1 / 3
    rank = toc.split(state, {"data_parallel_size": 2})[0]
    for number, each in enumerate((state, rank)):
        ours = tmp_path_factory.mktemp("ours") / f"checkpoint_{number}"
        toc.save(each, ours, format="runner", include_mixed_precision=True)
        found.append(_sample(ours))
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_mutants_load_or_are_refused(part: int, samples: list[Sample], tmp_path: Path) -> None:
    report = run(samples, tmp_path, seed=part, files=files_per_part(2000), format="runner")
    print(report)
    assert report.loaded > report.files // 20
    assert sum(report.refused.values()) > report.files // 4


def _sample(checkpoint: Path) -> Sample:
    """With the digits of offsets and lengths among the spots."""
    plain = sample(checkpoint)
    spots = {name: sequence_spots(content) for name, content in plain.files.items() if name.endswith(".pbseq")}
    described = plain.files["tensors.pbseq"]
    spots["tensors.pbseq"] += [Spot(place, 1) for place, byte in enumerate(described) if chr(byte).isdigit()]
    return Sample(plain.name, plain.files, plain.target, spots, (SEQUENCE,))
