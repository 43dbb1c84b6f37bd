"""Real processes under `torchrun` with gloo: the same numbers, one consistent checkpoint, failures that leave no half entry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torch_ort_ckpt as toc
from tests.training.setups import assert_equal, files_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.posix


def launch(*runs: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Each run is (ranks, arguments...); one after the other. What each reported, its exit codes and its errors."""
    plan = [[ranks, [str(argument) for argument in arguments]] for ranks, *arguments in runs]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "tests.training.forked", json.dumps(plan)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    return [{**report["result"], "codes": report["codes"], "errors": report["errors"]} for report in reports]


def steps_in(folder: Path) -> list[int]:
    found = toc.CheckpointManager(folder).list()
    for entry in found:
        entry.verify()
    return [entry.step for entry in found]


@pytest.mark.parametrize("kind", ["plain", pytest.param("graph", marks=pytest.mark.ort), "zero", "fsdp"])
def test_two_ranks_resume_to_the_bit(kind: str, tmp_path: Path) -> None:
    """Interrupted by SIGTERM on one rank, inside an accumulation window (where the engine gives its gradients out)."""
    more = ("--kind", kind, "--accumulate", 2, *(["--plain-loader"] if kind == "zero" else []))
    whole, first, second = launch(
        (2, tmp_path / "a", 16, *more), (2, tmp_path / "b", 16, *more, "--term", 7), (2, tmp_path / "b", 16, *more)
    )
    assert first["preempted"], first["errors"]
    assert first["step"] == (8 if kind == "fsdp" else 7)
    assert second["resumed"] == first["step"], second["errors"]
    assert second["digest"] == whole["digest"]
    assert steps_in(tmp_path / "b")[-1] == 8


@pytest.mark.parametrize("kind", ["plain", "fsdp", "zero"])
def test_another_number_of_ranks_goes_on_with_the_same_data(kind: str, tmp_path: Path) -> None:
    """The same samples per update (2 x 4 or 1 x 8) give the same training up to rounding, whoever draws them and holds the moments."""
    more = ("--accumulate", 2, "--kind", kind)
    whole, first, alone, back = launch(
        (2, tmp_path / "a", 12, *more),
        (2, tmp_path / "b", 12, *more, "--term", 5),
        (1, tmp_path / "b", 12, *more, "--batch", 8, "--term", 8),
        (2, tmp_path / "b", 12, *more),
    )
    assert alone["preempted"], alone["errors"]
    assert [part["resumed"] for part in (first, alone, back)] == [None, 6 if kind == "fsdp" else 5, 8], back["errors"]
    assert back["total"] == pytest.approx(whole["total"], rel=1e-5)


@pytest.mark.parametrize("background", [[], ["--async-save"]], ids=["sync", "async"])
def test_a_rank_killed_in_the_middle_of_a_save_leaves_no_half_entry(background: list[str], tmp_path: Path) -> None:
    whole, killed, again = launch(
        (2, tmp_path / "a", 10), (2, tmp_path / "b", 10, "--die", 6, *background), (2, tmp_path / "b", 10, *background)
    )
    assert killed["codes"][1] == -9
    assert killed["codes"][0] not in (0, -9)
    assert "lost contact with another rank" in killed["errors"]
    assert again["resumed"] == 4
    assert again["digest"] == whole["digest"]
    assert steps_in(tmp_path / "b") == [6, 8, 10]
    assert files_of(tmp_path / "b") == {"checkpoint_6", "checkpoint_8", "checkpoint_10"}


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_all_ranks_write_one_dcp_folder_each_its_share(kind: str, tmp_path: Path) -> None:
    """With FSDP2 the state's tensors are shards themselves; reading gives them whole."""
    (run,) = launch((2, tmp_path / "a", 4, "--kind", kind, "--dcp", tmp_path / "c.dcp"))
    assert run["codes"] == [0, 0], run["errors"]
    sizes = [place.stat().st_size for place in (tmp_path / "c.dcp").glob("*.distcp")]
    assert len(sizes) == 2
    assert min(sizes) > 0.2 * sum(sizes)
    entry = toc.CheckpointManager(tmp_path / "a").latest()
    assert entry is not None
    found, expected = toc.load(tmp_path / "c.dcp"), entry.state()
    assert_equal(dict(found.trainable), dict(expected.trainable))
    assert found.optimizer["group0"] == expected.optimizer["group0"]


def test_under_torchrun_a_failing_rank_ends_the_job_and_a_restart_resumes(tmp_path: Path) -> None:
    def torchrun(*arguments: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.training.worker"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.run([*command, *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    failed = torchrun(tmp_path, 8, "--fail", 5)
    assert failed.returncode != 0
    assert "this rank has had enough" in failed.stderr
    assert steps_in(tmp_path) == [2, 4]
    done = torchrun(tmp_path, 8)
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert (result["resumed"], result["step"]) == (4, 8)
