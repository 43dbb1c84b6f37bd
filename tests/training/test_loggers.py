"""A run's metrics in each tracker: the same figures at the same steps."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import torch_ort_ckpt as toc
from torch_ort_ckpt import CheckpointError

from .setups import data, plain


class Kept:
    """A logger of one's own."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, float]] = []
        self.closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows += [(step, name, value) for name, value in values.items()]

    def close(self) -> None:
        self.closed = True


def run(*loggers: toc.MetricsLogger, steps: int = 20, **options: Any) -> None:
    setup = plain()
    config = toc.RunnerConfig(num_train_steps=steps, display_loss_steps=5, evaluation_period=10, progress_bar=False, **options)
    toc.TrainingRunner(setup.model, setup.optimizer, config, loss=lambda model, batch: setup.loss(batch), loggers=loggers).run(
        data(), data()
    )


def test_files_hold_what_every_logger_gets(tmp_path: Path) -> None:
    kept = Kept()
    run(kept, toc.CSVLogger(tmp_path / "logs" / "run.csv"), toc.JSONLinesLogger(tmp_path / "run.jsonl"))
    assert kept.closed
    assert {name for _, name, _ in kept.rows} == {"loss", "lr", "throughput", "evaluation/loss"}
    assert sorted({step for step, name, _ in kept.rows if name == "loss"}) == [5, 10, 15, 20]
    assert sorted({step for step, name, _ in kept.rows if name == "evaluation/loss"}) == [10, 20]
    with open(tmp_path / "logs" / "run.csv", newline="") as file:
        rows = [(int(row["step"]), row["name"], float(row["value"])) for row in csv.DictReader(file)]
    assert rows == kept.rows
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [(line["step"], name, value) for line in lines for name, value in line.items() if name != "step"] == kept.rows


def test_a_second_run_continues_the_file(tmp_path: Path) -> None:
    for _ in range(2):
        run(toc.CSVLogger(tmp_path / "run.csv"), steps=5)
    text = (tmp_path / "run.csv").read_text()
    assert text.count("step,name,value") == 1
    assert text.count("5,loss,") == 2


def test_nan_is_valid_json(tmp_path: Path) -> None:
    logger = toc.JSONLinesLogger(tmp_path / "run.jsonl")
    logger.log(1, {"loss": float("nan"), "norm": float("-inf"), "lr": 0.1})
    logger.close()
    assert json.loads((tmp_path / "run.jsonl").read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "norm": None,
        "lr": 0.1,
    }


@pytest.mark.parametrize(("kind", "package"), [(toc.MLflowLogger, "mlflow"), (toc.WandbLogger, "wandb")])
def test_a_missing_package_is_told(kind: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CheckpointError, match=f"pip install {package}"):
        kind()


@pytest.mark.skipif(not importlib.util.find_spec("mlflow"), reason="needs mlflow")
def test_mlflow(tmp_path: Path) -> None:
    import mlflow

    kept, place = Kept(), f"sqlite:///{tmp_path / 'mlflow.db'}"
    logger = toc.MLflowLogger("mine", tracking_uri=place)
    run(kept, logger)
    client = mlflow.MlflowClient(tracking_uri=place)
    assert client.get_run(logger.run_id).info.status == "FINISHED"
    found = [(item.step, item.value) for item in client.get_metric_history(logger.run_id, "loss")]
    assert found == [(step, value) for step, name, value in kept.rows if name == "loss"]


WANDB = "import sys; from tests.training.test_loggers import run, toc; run(toc.WandbLogger('mine', mode='offline', directory=sys.argv[1]))"


@pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="needs wandb")
def test_wandb_offline(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", WANDB, str(tmp_path)], check=True, cwd=Path(__file__).parents[2]
    )  # it writes when the process ends
    written = list(tmp_path.rglob("run-*.wandb"))
    assert len(written) == 1
    assert written[0].read_bytes().count(b"evaluation/loss") >= 2
