"""Runs as curves, update sizes and odd units, against what PyTorch computes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from torch_ort_ckpt import report
from torch_ort_ckpt.cli import main
from torch_ort_ckpt.report.training import odd_units, update_ratios


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    with toc.CheckpointManager(tmp_path / "run", max_num_checkpoints=5) as manager:
        for step in range(1, 5):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            manager.save(step, model, optimizer, metrics={"loss": 1 / step})
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_the_update_against_the_weight_is_what_the_last_step_did(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    more = {"momentum": 0.9} if name == "SGD" else {"weight_decay": 0.0, "betas": (0.8, 0.95)}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.02, **more)
    for _ in range(3):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    expected = float((model.weight - before).norm() / model.weight.norm())
    assert update_ratios(toc.from_torch(model, optimizer))["weight"] == pytest.approx(expected, rel=1e-4)


def test_units_that_are_dead_or_exploding() -> None:
    weight = torch.ones(6, 2, 3)
    weight[1] = 0
    weight[4] *= 100
    assert odd_units(weight) == "1 dead, 1 exploding"
    assert odd_units(torch.ones(6, 3)) == ""
    assert odd_units(torch.zeros(6)) == ""  # a bias has no units
    assert odd_units(torch.zeros(2, 3)) == "2 dead"


def test_the_page_of_a_run_has_its_curves(run: Path) -> None:
    content = report.run_page([run])
    charts = {chart["title"]: chart["series"] for chart in content["charts"]}
    assert charts["loss"] == [{"name": "run", "points": [[step, 1 / step] for step in range(1, 5)]}]
    assert [y for _, y in charts["learning rate"][0]["points"]] == pytest.approx([0.02] * 4)
    state = toc.load(run / "checkpoint_4")
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in state.trainable.values()))
    assert charts["norm of all weights"][0]["points"][-1] == [4, pytest.approx(norm)]
    assert {"momentum0, RMS", "momentum1, RMS"} <= charts.keys()
    assert [row["step"] for row in content["rows"]] == [1, 2, 3, 4]


def test_federated_rounds_and_runs_side_by_side(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        state = toc.CheckpointState(
            trainable={"w": torch.full((2,), float(number))}, properties={"accuracy": 0.1 * number, "round": number}
        )
        toc.save(state, tmp_path / f"round{number}")
    rounds = [str(tmp_path / f"round{number}") for number in range(3)]
    page = tmp_path / "page.html"
    assert main(["checkpoints", str(run), *rounds, "--html", str(page)]) == 0
    assert "7 checkpoints" in capsys.readouterr().out
    assert main(["checkpoints", str(run), *rounds, "--html", str(page)]) == 2  # there already
    charts = {chart["title"]: chart["series"] for chart in report.run_page(rounds)["charts"]}
    assert [y for _, y in charts["accuracy"][0]["points"]] == pytest.approx([0.0, 0.1, 0.2])


def test_the_terminal_shows_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(run), "--stats"]) == 0
    out = capsys.readouterr().out
    assert "norm of weights" in out
    assert "0.02" in out
    assert main(["checkpoints", str(run), "--stats", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[-1]["lr"] == pytest.approx(0.02)
    assert rows[-1]["weights"] > 0
    (run / "checkpoint_4" / "checkpoint").write_bytes(b"x")
    assert main(["checkpoints", str(run), "--stats"]) == 1


def test_the_numbers_of_page_and_terminal_agree(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = str(run / "checkpoint_1"), str(run / "checkpoint_3")
    assert main(["diff", a, b]) == 1
    shown = capsys.readouterr().out.splitlines()[0].strip()
    content, found = report.comparison(a, b)
    assert dict(content["facts"])["Compared"] == shown == f"{len(found)} of {found.compared} differ"
