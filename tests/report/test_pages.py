"""The pages of `inspect --html` and `diff --html`: what they say, checked against the checkpoints they are about."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt import report
from torch_ort_ckpt.cli import main
from torch_ort_ckpt.report.histogram import BINS, histogram, histogram_of_difference

from ..truth import Truth, fixtures

ADAMW = Truth("fbv2_ort1_19_2_adamw_full").checkpoint


def content_of(page: Path) -> dict[str, Any]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(data)


def test_inspect_writes_what_the_checkpoint_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert main(["inspect", str(ADAMW), "--html", str(page)]) == 0
    assert "open it in a browser" in capsys.readouterr().out
    content, state = content_of(page), toc.load(ADAMW)
    rows = {row["name"]: row for row in content["rows"]}
    assert rows.keys() == state.parameters.keys()
    weight = state.trainable["fc1.weight"].double()
    row = rows["fc1.weight"]
    assert row["norm"] == pytest.approx(float(weight.norm()))
    assert row["momentum0"] == pytest.approx(
        float(state.optimizer["group0"].states["fc1.weight"]["momentum0"].double().square().mean().sqrt())
    )
    assert sum(row["histogram"]) == weight.numel()
    assert row["bytes"] == 3 * weight.numel() * 4
    assert dict(content["facts"])["Step"] == "5"


@pytest.mark.parametrize("name", [*fixtures("fbv2_ort1_19_2_"), "ortcp_ort1_13_1_adam", "cpp_runner_v1_8_1_lamb_mixed"])
def test_every_kind_of_checkpoint_has_a_page(name: str, tmp_path: Path) -> None:
    checkpoint = Truth(name).checkpoint
    content = report.inspection(checkpoint)
    report.write(content, tmp_path / "report.html")
    state = toc.load(checkpoint)
    assert len(content_of(tmp_path / "report.html")["rows"]) == len(state.parameters) + len(state.mixed_precision)


def test_nan_and_infinity_are_marked_in_weights_and_moments(tmp_path: Path) -> None:
    state = toc.CheckpointState(trainable={"good": torch.ones(3), "bad": torch.tensor([1.0, math.nan, math.inf])})
    moments = {"momentum0": torch.tensor([math.nan, 0, 0]), "momentum1": torch.ones(3)}
    state.optimizer["group0"] = toc.OptimizerGroup(1, states={"good": moments, "bad": {key: torch.ones(3) for key in moments}})
    toc.save(state, tmp_path / "checkpoint")
    rows = {row["name"]: row for row in report.inspection(tmp_path / "checkpoint")["rows"]}
    assert rows["bad"]["problems"] == "1 NaN, 1 Inf"
    assert rows["good"]["problems"] == "momentum0: 1 NaN"


def test_without_statistics_nothing_is_measured(tmp_path: Path) -> None:
    assert main(["inspect", str(ADAMW), "--no-stats", "--html", str(tmp_path / "page.html")]) == 0
    content = content_of(tmp_path / "page.html")
    assert all("norm" not in row and "histogram" not in row for row in content["rows"])
    assert "norm" not in {column["key"] for column in content["columns"]}


def test_diff_plots_the_change_of_each_tensor(tmp_path: Path) -> None:
    a = toc.load(ADAMW)
    b = a.clone()
    b.trainable["fc1.weight"] += 0.5
    b.properties["new"] = 1
    toc.save(b, tmp_path / "b")
    page = tmp_path / "diff.html"
    assert main(["diff", str(ADAMW), str(tmp_path / "b"), "--html", str(page)]) == 1
    content = content_of(page)
    rows = {f"{row['kind']}/{row['name']}": row for row in content["rows"]}
    assert rows.keys() == dict(a.tensors()).keys()
    moved = {name for name, row in rows.items() if row["what"] != "equal"}
    assert moved == {"trainable/fc1.weight"}
    row, weight = rows["trainable/fc1.weight"], a.trainable["fc1.weight"].double()
    assert row["change"] == pytest.approx(0.5 * math.sqrt(weight.numel()) / float(weight.norm()), rel=1e-5)
    assert row["changed"] == 1
    assert row["histogram"][-1] == weight.numel()  # everything moved up, by the largest change
    assert content["tables"][0]["rows"] == [["properties/new", "only in b"]]
    assert content["charts"][0] | {"title": ""} == {"type": "bars", "title": "", "value": "change"}


def test_diff_of_equal_checkpoints_says_so(tmp_path: Path) -> None:
    assert main(["diff", str(ADAMW), str(ADAMW), "--html", str(tmp_path / "page.html")]) == 0
    assert dict(content_of(tmp_path / "page.html")["facts"])["Result"] == "equal"


def test_names_from_files_stay_data(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><!--"
    toc.save(toc.CheckpointState(trainable={hostile: torch.ones(1)}, properties={hostile: hostile}), tmp_path / "checkpoint")
    report.write(report.inspection(tmp_path / "checkpoint"), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count("<script") == 2
    assert "alert(1)</" not in text
    assert content_of(tmp_path / "page.html")["rows"][0]["name"] == hostile


def test_the_page_has_no_address_to_fetch_from(tmp_path: Path) -> None:
    report.write(report.inspection(ADAMW), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert set(re.findall(r"""(?:src|href)=["']([^"']*)""", text)) == {"data:,"}
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert "default-src 'none'" in text


def test_histograms_count_every_finite_element_once() -> None:
    values = torch.cat([torch.linspace(-1, 1, 1001), torch.tensor([math.nan, math.inf])])
    counts = histogram(values, -1.0, 1.0)
    assert counts is not None
    assert len(counts) == BINS
    assert sum(counts) == 1001
    assert max(counts) - min(counts) <= 2
    assert histogram(torch.ones(3), 1.0, 1.0) is None
    huge = histogram(torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64), -1.7e308, 1.7e308)
    assert huge is not None
    assert (huge[0], huge[-1]) == (1, 1)
    assert histogram_of_difference(torch.ones(3), torch.ones(3)) is None
