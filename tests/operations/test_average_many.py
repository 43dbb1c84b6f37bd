"""`average` over many files, and the averages that withstand wrong inputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt import CheckpointError
from torch_ort_ckpt.cli import main
from torch_ort_ckpt.operations import average as module

ROOT = Path(__file__).parents[2]


def states(count: int, size: int = 2000, dtype: torch.dtype = torch.float32) -> list[toc.CheckpointState]:
    generator = torch.Generator().manual_seed(count)
    return [
        toc.CheckpointState(
            trainable={"w": torch.randn(size, generator=generator).to(dtype), "b": torch.randn(3, generator=generator).to(dtype)},
            frozen={"n": torch.randint(-9, 9, (5,), generator=generator)},
        )
        for _ in range(count)
    ]


def stacked(many: list[toc.CheckpointState], name: str) -> np.ndarray[Any, Any]:
    return np.stack([state.parameters[name].double().numpy() for state in many])


@pytest.mark.parametrize("piece", [1 << 22, 64])
@pytest.mark.parametrize("count", [1, 2, 7, 10])
def test_the_median_and_the_trimmed_mean_are_numpy_s(count: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", piece)
    monkeypatch.setattr(module, "_LEAST", 16)
    many = states(count)
    median, trimmed = toc.average(many, how="median"), toc.average(many, how="trimmed", trim=0.2)
    cut = int(0.2 * count)
    for name in ("w", "b"):
        np.testing.assert_allclose(median.trainable[name], np.median(stacked(many, name), axis=0).astype(np.float32), rtol=0)
        kept = np.sort(stacked(many, name), axis=0)[cut : count - cut]
        np.testing.assert_allclose(trimmed.trainable[name], kept.mean(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(median.frozen["n"], np.round(np.median(stacked(many, "n"), axis=0)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    many = states(5, dtype=dtype)
    found = toc.average(many, how="median").trainable["w"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.double(), np.median(stacked(many, "w"), axis=0))


@pytest.mark.parametrize("how", ["median", "trimmed"])
def test_two_bad_ones_of_ten_do_not_matter(how: str) -> None:
    good = states(8)
    bad = [toc.CheckpointState(trainable={k: v + 1e6 for k, v in s.trainable.items()}, frozen=dict(s.frozen)) for s in states(2)]
    found = toc.average([*bad, *good], how=how, trim=0.2)
    assert float(found.trainable["w"].abs().max()) < 10
    assert float(toc.average([*bad, *good]).trainable["w"].abs().max()) > 1e5


@pytest.mark.parametrize("how", ["mean", "median", "trimmed"])
def test_files_give_what_states_give_and_nan_is_seen_in_them(how: str, tmp_path: Path) -> None:
    many = states(5)
    for number, state in enumerate(many):
        toc.save(state, tmp_path / f"{number}{'.safetensors' if number % 2 else ''}")
    paths = [tmp_path / f"{number}{'.safetensors' if number % 2 else ''}" for number in range(5)]
    assert toc.average(paths, how=how) == toc.average(many, how=how)
    many[3].trainable["w"][1999] = float("nan")
    toc.save(many[3], paths[3])
    with pytest.raises(CheckpointError, match=r"3\.safetensors.*NaN"):
        toc.average(paths, how=how)
    with pytest.warns(toc.CheckpointWarning, match="1 of 5"):
        found = toc.average(paths, how=how, skip_bad=True)
    assert found == toc.average([*many[:3], many[4]], how=how)


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    many = states(2)
    for number, state in enumerate(many):
        toc.save(state, tmp_path / str(number))

    def change(count: int) -> None:
        toc.save(many[0], tmp_path / "1")

    with pytest.raises(CheckpointError, match="changed while"):
        toc.average([tmp_path / "0", tmp_path / "1"], progress=change)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"how": "mode"}, "how"),
        ({"how": "median", "weights": [1, 2]}, "weights"),
        ({"how": "trimmed", "trim": 0.5}, "trim"),
        ({"how": "trimmed", "trim": -0.1}, "trim"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        toc.average(states(2), **options)
    assert caught.value.field == field


def test_complex_numbers_have_no_order() -> None:
    many = [toc.CheckpointState(trainable={"w": torch.tensor([1 + 1j, number * 1j])}) for number in range(3)]
    with pytest.raises(CheckpointError, match="complex"):
        toc.average(many, how="median")


def test_the_command_line(tmp_path: Path) -> None:
    many = states(5)
    for number, state in enumerate(many):
        toc.save(state, tmp_path / str(number))
    paths = [str(tmp_path / str(number)) for number in range(5)]
    assert main(["average", *paths, "-o", str(tmp_path / "out"), "--how", "trimmed", "--trim", "0.2"]) == 0
    assert torch.equal(toc.load(tmp_path / "out").trainable["w"], toc.average(many, how="trimmed", trim=0.2).trainable["w"])


MANY = """
import resource, sys
from pathlib import Path
import torch
import torch_ort_ckpt as toc
folder, count, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
weights = torch.arange(300_000, dtype=torch.float32)
toc.save(toc.CheckpointState(trainable={"w": weights}), folder / "0")
for number in range(1, count):
    (folder / str(number)).hardlink_to(folder / "0")
toc.average([folder / "0"] * 4, how=how)  # what is imported and allocated once
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = toc.average([folder / str(number) for number in range(count)], how=how)
assert torch.equal(found.trainable["w"], weights)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.posix  # limits descriptors, and there files are mapped
@pytest.mark.parametrize("how", ["mean", "median"])
def test_a_thousand_files_need_neither_descriptors_nor_memory(how: str, tmp_path: Path) -> None:
    """1.2 MB each: 1.2 GB of checkpoints, with 64 descriptors."""
    command = [sys.executable, "-c", MANY, str(tmp_path), "1000", how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 300  # MB; all of them at once would be 1200
