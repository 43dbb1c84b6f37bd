"""Mutants of safetensors files, `torch.save` files and ONNX models."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc

from ..truth import Truth
from .codecs import ARCHIVE, MODEL, OBJECTS, SAFETENSORS
from .mutate import PARTS, Sample, Spot, files_per_part, run, sample

STATES = ("fbv2_ort1_19_2_adamw_full", "fbv2_ort1_19_2_strings", "fbv2_ort1_19_2_dtypes")


def rich(name: str) -> toc.CheckpointState:
    """A state that uses every field of the metadata stored beside the tensors."""
    state = toc.load(Truth(name).checkpoint)
    masters = [(weight, value) for weight, value in state.parameters.items() if getattr(value, "dtype", None) == torch.float32]
    state.mixed_precision.update((weight, value.half()) for weight, value in masters)
    for group in state.optimizer.values():
        group.lr, group.hyperparameters = 0.02, {"betas": [0.9, 0.95]}
    state.partitions[next(iter(state.trainable))] = toc.PartitionInfo((4, 8), 1)
    return state


def samples_of(format: str, folder: Path) -> list[Sample]:
    found = []
    for name in STATES:
        state = rich(name)
        if format == "safetensors":
            for limit in (1 << 30, 500):
                place = folder / f"{name}-{limit}" / "checkpoint"
                toc.save(state, place, format="safetensors", include_mixed_precision=True, max_shard_size=limit)
                found.append(sample(place, header_spots, SAFETENSORS))
        else:
            (folder / name).mkdir()
            toc.save(state, folder / name / "checkpoint.pt", format="torch", include_mixed_precision=True)
            found.append(sample(folder / name / "checkpoint.pt", zip_spots, OBJECTS, ARCHIVE))
    return found


def header_spots(data: bytes) -> list[Spot]:
    """The length, and every digit, quote and bracket of a safetensors header or an index."""
    length = int.from_bytes(data[:8], "little") if data[8:9] == b"{" else len(data)
    return [Spot(0, 8)] + [Spot(8 + n, 1) for n, byte in enumerate(data[8 : 8 + length]) if chr(byte) in '0123456789"[]{}:,']


def zip_spots(data: bytes) -> list[Spot]:
    """Every byte of the pickle and of the directory at the end."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = next(item for item in archive.infolist() if item.filename.endswith("data.pkl"))
        start = info.header_offset + 30 + len(info.filename)
        pickled = [Spot(position, 1) for position in range(start, start + info.file_size)]
        return pickled + [Spot(archive.start_dir + n, 2) for n in range(0, 40, 2)]


@pytest.mark.parametrize("format", ["safetensors", "torch"])
@pytest.mark.parametrize("part", range(PARTS))
def test_mutants_load_or_are_refused(part: int, format: str, tmp_path: Path) -> None:
    report = run(samples_of(format, tmp_path), tmp_path, seed=part, files=files_per_part(600), format=format, checksums=format == "torch")
    print(report)
    assert report.loaded or report.files < 500  # in a short run every mutant may be refused
    assert sum(report.refused.values()) > report.files // 4


@pytest.mark.parametrize("part", range(PARTS))
def test_mutants_of_models_load_or_are_refused(part: int, tmp_path: Path) -> None:
    found = []
    for name in ("inference_model", "eval_model", "training_model"):
        (tmp_path / name).mkdir()
        content = (Truth(STATES[0]).folder / f"{name}.onnx").read_bytes()
        (tmp_path / name / "checkpoint.onnx").write_bytes(content)
        found.append(sample(tmp_path / name / "checkpoint.onnx", None, MODEL))
    report = run(found, tmp_path, seed=part, files=files_per_part(400), format="ort")
    print(report)
    assert report.loaded or report.files < 500
    assert report.refused
