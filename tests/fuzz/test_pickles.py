"""Mutants of the pickles inside `torch.save` files, in archives that are sound (so that no checksum protects them), and of DCP's index."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import torch_ort_ckpt as toc
from tests.models import trained

from .mutate import PARTS, Mutant, Report, Sample, Spot, check, files_per_part, limited_memory, mutant


def archives() -> list[Sample]:
    """The records of archives as files of their own."""
    model, optimizer = trained()
    contents = {
        "bare": model.state_dict(),
        "training": {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "more": [1, {"a": (2.5, b"x")}]},
        "views": {"a": torch.arange(12.0).reshape(3, 4).T, "b": torch.ones(3).expand(2, 3), "c": nn.Parameter(torch.ones(2).half())},
    }
    found = []
    for name, content in contents.items():
        file = io.BytesIO()
        torch.save(content, file)
        with zipfile.ZipFile(file) as archive:
            records = {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}
        pickled = records["data.pkl"]
        found.append(Sample(name, records, "", {"data.pkl": [Spot(position, 1) for position in range(len(pickled))]}))
    return found


def archived(case: Mutant) -> Mutant:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in case.files.items():
            archive.writestr(f"x/{name}", content)
    return Mutant({"x.pt": file.getvalue()}, "x.pt", case.story)


def folders(place: Path) -> list[Sample]:
    model, optimizer = trained()
    toc.save(toc.from_torch(model, optimizer), place / "ours", format="dcp")
    dcp.save({"model": model.state_dict(), "epoch": 3}, checkpoint_id=place / "theirs", no_dist=True)
    found = []
    for name in ("ours", "theirs"):
        files = {item.name: item.read_bytes() for item in (place / name).iterdir()}
        found.append(Sample(name, files, ".", {".metadata": [Spot(position, 1) for position in range(len(files[".metadata"]))]}))
    return found


@pytest.mark.parametrize("kind", ["archives", "folders"])
@pytest.mark.parametrize("part", range(PARTS))
def test_mutants_load_or_are_refused(part: int, kind: str, tmp_path: Path) -> None:
    samples = archives() if kind == "archives" else folders(tmp_path)
    report = Report()
    with limited_memory():
        for number in range(files_per_part(600)):
            case = mutant(samples, part, number)
            case = archived(case) if kind == "archives" else case
            try:
                check(case, tmp_path / "case", report, "torch", {}, measured=number > 0 and number % 16 == 0, checksums=kind == "archives")
            except BaseException as error:
                raise AssertionError(f"mutant {number} of seed {part} ({case.story}): {type(error).__name__}: {error}") from error
    print(report)
    assert report.loaded
    assert sum(report.refused.values()) > report.files // 4
