"""The example: a loss in plain PyTorch, the same losses as PyTorch alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import torch_ort_ckpt as toc

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_loss.py"


def test_custom_loss(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("custom_loss", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    ours, theirs = example.main(tmp_path, steps=30)
    assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    assert ours[-1] < ours[0] / 2
    assert [item.name for item in toc.Artifacts.load(tmp_path).inputs][1:] == ["labels", "importance"]
