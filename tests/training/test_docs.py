"""The figures in docs/scale.md are those the function gives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch_ort_ckpt as toc

ROOT = Path(__file__).parents[2]


def test_the_table_is_what_the_example_prints() -> None:
    page = (ROOT / "docs" / "scale.md").read_text()
    printed = subprocess.run(
        [sys.executable, "examples/optimal_period.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert printed.stdout.strip() in page


def test_the_sentence_about_a_thousand_nodes_holds() -> None:
    page = (ROOT / "docs" / "scale.md").read_text()
    plan = toc.optimal_checkpoint_period(12, 50_000, 1024, restart_seconds=300, step_seconds=1.5)
    assert re.search(rf"save every {plan.period_seconds / 60:.0f} minutes, {plan.period_steps} steps", page)
