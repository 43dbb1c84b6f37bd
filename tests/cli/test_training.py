"""`train`, `resume` and `checkpoints` as a user types them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.training.setups import ADAMW
from torch_ort_ckpt.cli import main
from torch_ort_ckpt.cli.training import read_config

DATA_MODULE = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def loaders(count, test=True):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, {features}, generator=generator)
    y = torch.randint(0, 2, (count,), generator=generator)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    return (loader, loader) if test else loader

def nothing(count):
    pass

def number(count):
    return count

def three(count):
    return [], [], []

def batches(count):
    return list(loaders(count, test=False))
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    import torch_ort_ckpt as toc

    features = toc.Artifacts.load(ADAMW).inputs[0].shape[1]
    (tmp_path / "mydata.py").write_text(DATA_MODULE.format(features=features))
    os.symlink(ADAMW, tmp_path / "artifacts")
    path = tmp_path / "config.yaml"
    path.write_text(
        """
artifacts: artifacts
data: mydata:loaders
data_arguments: {count: 40}
model: {threads: 1}
runner:
  num_train_steps: 10
  checkpoints_dir: checkpoints
  checkpoint_period: 3
  max_num_checkpoints: 3
  evaluation_period: 5
  lr: {initial: 0.01, mode: linear, warmup: 0.1}
  perf_output_dir: perf
"""
    )
    return path


@pytest.mark.ort
def test_train_list_and_resume(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = config.parent / "checkpoints"
    assert main(["train", str(config)]) == 0
    assert "step 10, 10 updates" in capsys.readouterr().out
    assert (config.parent / "perf" / "perf_metrics.json").exists()
    assert main(["checkpoints", str(folder), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows] == [6, 9, 10]
    assert rows[-1]["metrics"].keys() == {"loss"}
    assert main(["resume", str(folder), "--steps", "14"]) == 0
    assert "resumed from step 10" in capsys.readouterr().out
    (folder / "checkpoint_14" / "checkpoint").write_bytes(b"damaged")
    assert main(["checkpoints", str(folder)]) == 1
    table = capsys.readouterr().out
    assert "checkpoint: 7 bytes" in table
    assert "complete" in table
    assert main(["checkpoints", str(folder), "--verify"]) == 1
    assert "verified" in capsys.readouterr().out
    assert main(["resume", str(folder), "--steps", "14"]) == 0
    captured = capsys.readouterr()
    assert "skipping a damaged checkpoint" in captured.err
    assert "resumed from step 12" in captured.out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("mydata:loaders", "nowhere:loaders"), "can't be imported"),
        (("mydata:loaders", "mydata"), "module:function"),
        (("mydata:loaders", "mydata:nope"), "mydata has no function nope"),
        (("count: 40", "cnt: 40"), "data_arguments: mydata:loaders does not take them"),
        (("count: 40", "count: forty"), "mydata.py, line"),
        (("num_train_steps: 10", "num_train_steps: ten"), "num_train_steps"),
        (("max_num_checkpoints", "max_checkpoints"), "no such setting"),
        (("artifacts: artifacts", "artefacts: artifacts"), "no such section"),
        (("lr: {", "lr: {{"), "malformed"),
        (("mydata:loaders", "mydata:nothing"), "mydata:nothing returned NoneType, not a loader or two"),
        (("mydata:loaders", "mydata:number"), "returned int"),
        (("mydata:loaders", "mydata:three"), "returned 3 loaders"),
    ],
)
def test_mistakes_in_the_file_are_named(config: Path, change: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text().replace(*change))
    assert main(["train", str(config)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (config.parent / "checkpoints" / "run.json").exists()  # nothing to resume


@pytest.mark.ort
def test_rates_without_a_point_and_a_list_of_batches(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = config.read_text().replace("mydata:loaders", "mydata:batches").replace("initial: 0.01", "initial: 1e-2")
    config.write_text(text.replace("  evaluation_period: 5\n", ""))
    assert main(["train", str(config)]) == 0
    assert "step 10, 10 updates" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "value"), [("1e-2", 0.01), ("-1E+3", -1000.0), ("1.5e3", 1500.0), (".5e1", 5.0), ("1e", "1e"), ("e1", "e1")]
)
def test_numbers_of_yaml(tmp_path: Path, text: str, value: object) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "c.yaml").write_text(f"rate: {text}")
    assert read_config(tmp_path / "c.yaml") == {"rate": value}


def test_a_folder_without_a_run_can_not_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(tmp_path)]) == 2
    assert "no run was started here" in capsys.readouterr().err
    assert main(["checkpoints", str(tmp_path / "none")]) == 2
