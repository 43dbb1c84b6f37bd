"""The example: two changed lines, the same losses."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torch_ort_ckpt as toc

pytestmark = pytest.mark.ort

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_loop.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_loops_give_the_same_losses(example: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    toc.export_artifacts(example.Classifier(), (torch.randn(2, 16),), tmp_path, exporter="torchscript")
    native, ours = example.train_native(30), example.train_ort(30, str(tmp_path))
    assert ours == pytest.approx(native, rel=1e-3)
    assert ours[-1] < ours[0] / 2


def test_the_loops_differ_in_two_lines(example: ModuleType) -> None:
    native, ours = (inspect.getsource(getattr(example, name)).splitlines()[1:] for name in ("train_native", "train_ort"))
    changed = [line for line in difflib.ndiff(native, ours) if line.startswith("+ ")]
    assert len(changed) == 2
    assert all(line.endswith("# ORT") for line in changed)


def test_it_runs_as_a_script() -> None:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1])}
    command = [sys.executable, str(EXAMPLE), "--steps", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "step   4" in done.stdout
