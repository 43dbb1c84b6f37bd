"""What people type: folders of ours, folders as destinations, missing files among others, misspelled options."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.truth import DATA
from torch_ort_ckpt.cli import main

FIXTURE = DATA / "fbv2_ort1_19_2_adamw_full"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copy(FIXTURE / "checkpoint", tmp_path / "ck"))


def test_an_entry_of_a_checkpoint_directory_is_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with toc.CheckpointManager(tmp_path / "run") as manager:
        manager.save(60, model, optimizer, metrics={"loss": 0.5})
    entry = tmp_path / "run" / "checkpoint_60"
    assert toc.detect(entry) == "ort"
    assert toc.diff(toc.load(entry), entry / "checkpoint").equal
    assert main(["inspect", str(entry)]) == 0
    assert "weight" in capsys.readouterr().out
    assert main(["convert", str(entry), str(tmp_path / "out.safetensors")]) == 0
    assert toc.diff(entry, tmp_path / "out.safetensors").equal


def test_a_folder_of_artifacts_is_its_checkpoint() -> None:
    assert toc.diff(FIXTURE, FIXTURE / "checkpoint").equal


def test_inspect_says_what_artifacts_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(FIXTURE), "--no-stats"]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in ("labels: int64[batch]", "kind='AdamW'", "runs on CUDA (engine ort): all", "fc1.weight  "))
    assert main(["inspect", str(FIXTURE), "--no-stats", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["artifacts"]["optimizer"]["kind"] == "AdamW"
    shutil.copy(FIXTURE / "eval_model.onnx", tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "missing    checkpoint" in capsys.readouterr().out


def test_modules_and_artifacts_show_themselves() -> None:
    artifacts = toc.Artifacts.load(FIXTURE)
    shown = repr(toc.OrtModule(artifacts, engine="torch"))
    assert "weight: float32 [16, 12], trained" in shown
    assert "f32: float32 [16], frozen" in shown
    assert "input labels: int64[batch]" in shown
    assert "<td>fc1.weight</td>" in artifacts._repr_html_()


def test_two_checkpoints_in_a_folder_are_not_a_rank_set(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "two").mkdir()
    for name in ("checkpoint", "initial_checkpoint"):
        shutil.copy(checkpoint, tmp_path / "two" / name)
    with pytest.raises(toc.CheckpointError, match=r"holds 2 checkpoints that are not ranks of one run: checkpoint, initial_checkpoint"):
        toc.load(tmp_path / "two")


@pytest.mark.parametrize(
    ("arguments", "written"),
    [((), "ck"), (("--to", "safetensors"), "ck.safetensors"), (("--to", "torch"), "ck.pt"), (("--to", "pbseq"), "")],
)
def test_a_folder_as_destination(tmp_path: Path, checkpoint: Path, arguments: tuple[str, ...], written: str) -> None:
    assert main(["convert", str(checkpoint), f"{tmp_path}/new/", *arguments]) == 0
    place = tmp_path / "new" / written
    assert toc.diff(checkpoint, place).equal
    assert main(["convert", str(checkpoint), f"{tmp_path}/new/", *arguments]) == 2  # there already


def test_a_known_suffix_is_replaced_in_a_folder(tmp_path: Path, checkpoint: Path) -> None:
    toc.convert(checkpoint, tmp_path / "model.safetensors")
    toc.convert(tmp_path / "model.safetensors", f"{tmp_path}/back/")
    assert toc.diff(checkpoint, tmp_path / "back" / "model").equal


def test_verify_reports_every_file(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(checkpoint.read_bytes()[:100])
    paths = [str(tmp_path / "missing"), str(checkpoint), str(bad)]
    assert main(["verify", *paths]) == 2
    out, err = capsys.readouterr()
    assert "missing: no such file" in err
    assert f"{checkpoint}: ok" in out
    assert str(bad) in out
    assert main(["verify", "--json", *paths]) == 2
    assert [item["ok"] for item in json.loads(capsys.readouterr().out)] == [False, True, False]


def test_a_name_map_of_unknown_weights_is_an_error(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "names.json").write_text('{"nonsense": "fc.weight"}')
    assert main(["convert", str(checkpoint), str(tmp_path / "o.safetensors"), "--name-map", str(tmp_path / "names.json")]) == 2
    assert "has no nonsense" in capsys.readouterr().err
    assert not (tmp_path / "o.safetensors").exists()


def test_only_formats_that_can_be_written_are_offered(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "x.foo")]) == 2
    err = capsys.readouterr().err
    assert "safetensors" in err
    assert "ortpt" not in err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(["convert", "a", "b", "--dtpye", "half"], "--dtype"), (["inspect", "a", "--htlm=x"], "--html"), (["diff", "a", "b", "--zzz"], "")],
)
def test_the_nearest_option_is_suggested(typed: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(typed)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert (f"did you mean {meant}?" in err) == bool(meant)
    assert f"usage: torch-ort-ckpt {typed[0]}" in err


def test_what_was_written_is_named(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "m.safetensors"), "--max-shard-size", "500B"]) == 0
    out = capsys.readouterr().out
    assert "verified" in out
    written = {place.name for place in tmp_path.glob("m*")}
    assert len(written) > 3
    assert all(name in out for name in written)
    assert main(["convert", str(checkpoint), str(tmp_path / "n.safetensors"), "--no-verify"]) == 0
    assert "verified" not in capsys.readouterr().out


def test_a_model_does_not_report_moments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(shutil.copy(FIXTURE / "inference_model.onnx", tmp_path / "m.onnx"))
    with pytest.warns(toc.CheckpointWarning):
        toc.convert(FIXTURE, model, overwrite=True)
    assert main(["convert", str(FIXTURE), str(model), "--overwrite"]) == 0
    assert "step 5" not in capsys.readouterr().out
