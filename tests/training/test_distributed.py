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
from tests.training.setups import files_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="gloo over fork")


def launch(ranks: int, *arguments: Any, expect: int = 0) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "tests.training.worker"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [*command, *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode == 0) == (expect == 0), done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}, done.stderr


def steps_in(folder: Path) -> list[int]:
    found = toc.CheckpointManager(folder).list()
    for entry in found:
        entry.verify()
    return [entry.step for entry in found]


@pytest.mark.parametrize("kind", ["plain", pytest.param("graph", marks=pytest.mark.ort), "zero", "fsdp"])
def test_two_ranks_resume_to_the_bit(kind: str, tmp_path: Path) -> None:
    """Interrupted by SIGTERM on one rank, inside an accumulation window (where the engine gives its gradients out)."""
    whole, _ = launch(2, tmp_path / "a", 16, "--kind", kind, "--accumulate", 2)
    first, _ = launch(2, tmp_path / "b", 16, "--kind", kind, "--accumulate", 2, "--term", 7)
    second, _ = launch(2, tmp_path / "b", 16, "--kind", kind, "--accumulate", 2)
    assert first["preempted"]
    assert first["step"] == (8 if kind == "fsdp" else 7)
    assert second["resumed"] == first["step"]
    assert second["digest"] == whole["digest"]
    assert steps_in(tmp_path / "b")[-1] == 8


def test_another_number_of_ranks_goes_on_with_the_same_data(tmp_path: Path) -> None:
    """The same samples per update (2 x 4 or 1 x 8) give the same training up to rounding, whoever draws them."""
    whole, _ = launch(2, tmp_path / "a", 12, "--accumulate", 2)
    launch(2, tmp_path / "b", 12, "--accumulate", 2, "--term", 5)
    alone, _ = launch(1, tmp_path / "b", 12, "--accumulate", 2, "--batch", 8)
    assert alone["resumed"] == 5
    assert alone["total"] == pytest.approx(whole["total"], rel=1e-6)
    launch(1, tmp_path / "c", 12, "--batch", 8, "--term", 99, "--accumulate", 2)
    assert steps_in(tmp_path / "c")[-1] == 6


@pytest.mark.parametrize("background", [[], ["--async-save"]], ids=["sync", "async"])
def test_a_rank_killed_in_the_middle_of_a_save_leaves_no_half_entry(background: list[str], tmp_path: Path) -> None:
    whole, _ = launch(2, tmp_path / "a", 10)
    _, errors = launch(2, tmp_path / "b", 10, "--die", 6, *background, expect=1)
    assert "rank" in errors
    left = [name for name in files_of(tmp_path / "b") if not name.startswith(".")]
    assert sorted(left) == ["checkpoint_2", "checkpoint_4"]
    assert steps_in(tmp_path / "b") == [2, 4]
    assert files_of(tmp_path / "b") == {"checkpoint_2", "checkpoint_4"}
    again, _ = launch(2, tmp_path / "b", 10, *background)
    assert again["resumed"] == 4
    assert again["digest"] == whole["digest"]


def test_a_failing_rank_ends_the_job_and_a_restart_resumes(tmp_path: Path) -> None:
    _, errors = launch(2, tmp_path, 8, "--fail", 5, expect=1)
    assert "this rank has had enough" in errors
    result, _ = launch(2, tmp_path, 8)
    assert (result["resumed"], result["step"]) == (4, 8)
