"""Mutants of the files of `experimental_save_checkpoint`."""

from __future__ import annotations

import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from ..truth import Truth, fixtures
from .codecs import ARCHIVE, OBJECTS
from .mutate import PARTS, Sample, Spot, files_per_part, run

CODECS = (OBJECTS, ARCHIVE)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    found = []
    for name in fixtures("ortpt"):
        truth = Truth(name)
        single = isinstance(truth.json["checkpoint"], str)
        names = [truth.json["checkpoint"]] if single else truth.json["checkpoint"]
        files = {file: (truth.folder / file).read_bytes() for file in names}
        found.append(Sample(name, files, names[0] if single else ".", {file: spots(content) for file, content in files.items()}, CODECS))
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_mutants_load_or_are_refused(part: int, samples: list[Sample], tmp_path: Path) -> None:
    report = run(samples, tmp_path, seed=part, files=files_per_part(1000), format="ort", groups="keep")
    print(report)
    assert report.loaded or report.files < 500  # checksums catch most mutants
    assert sum(report.refused.values()) > report.files // 4


def spots(data: bytes) -> list[Spot]:
    """The pickle inside the archive, byte by byte: it says what the tensors are."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        entry = next(entry for entry in archive.infolist() if entry.filename.endswith("data.pkl"))
        start = data.index(archive.read(entry))
    return [Spot(place, 1) for place in range(start, start + entry.file_size)]
