"""The command line on the older generations and on rank sets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import torch_ort_ckpt as toc
from tests.truth import Truth
from torch_ort_ckpt.cli import main

SOURCES = {
    "pbseq": Truth("pbseq_ort1_15_1_adamw_full").checkpoint,
    "runner": Truth("cpp_runner_v1_8_1_lamb_mixed").checkpoint,
    "ortcp": Truth("ortcp_ort1_14_1_adam").checkpoint,
    "ortcp set": Truth("ortcp_ort1_13_1_zero1_megatron_colsplit").folder,
    "ortpt": Truth("ortpt_ort1_12_0_experimental").checkpoint,
    "ortpt set": Truth("ortpt_ort1_13_1_zero_mixed").folder,
}
SET = Truth("ortcp_ort1_13_1_zero1_d4_lamb_mixed")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.mark.parametrize("kind", SOURCES)
def test_every_command_takes_every_generation(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = SOURCES[kind]
    state = toc.load(source)
    assert run(capsys, "verify", source)[0] == 0
    assert run(capsys, "convert", source, tmp_path / "c.safetensors", "--mixed-precision")[0] == 0
    assert toc.load(tmp_path / "c.safetensors") == state
    assert run(capsys, "diff", source, tmp_path / "c.safetensors")[0] == 0
    assert run(capsys, "average", source, source, "-o", tmp_path / "mean")[0] == 0
    assert toc.load(tmp_path / "mean").trainable.keys() == state.trainable.keys()


@pytest.mark.parametrize(
    ("kind", "releases"),
    [("pbseq", "1.13 to 1.15"), ("runner", "C++ TrainingRunner"), ("ortcp set", "1.7 to 1.14"), ("ortpt", "experimental_load_checkpoint")],
)
def test_inspect_says_which_releases_read_the_file(kind: str, releases: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "inspect", SOURCES[kind])
    assert f"readable as it is by {toc.formats.read_by(kind.split()[0])}" in " ".join(out.split())
    assert releases in " ".join(out.split())
    _, out, _ = run(capsys, "inspect", SOURCES[kind], "--json", "--no-stats")
    assert releases in json.loads(out)["read_by"]


def test_inspect_tells_the_versions_of_the_flatbuffer_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "by ORT 1.16 and 1.17" in run(capsys, "inspect", Truth("fbv1_ort1_16_3_adamw_full").checkpoint)[1]
    assert "by ORT 1.18 and later" in run(capsys, "inspect", Truth("fbv2_ort1_19_2_adamw_full").checkpoint)[1]
    toc.save(toc.CheckpointState(), tmp_path / "x.safetensors", format="safetensors")
    assert "by no release of ORT" in run(capsys, "inspect", tmp_path / "x.safetensors")[1]


@pytest.mark.ort
@pytest.mark.parametrize("kind", [kind for kind in SOURCES if kind != "pbseq"])  # that one has bfloat16, which ORT's Python loader refuses
def test_ort_reads_what_was_upgraded(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from onnxruntime.training.api import CheckpointState

    assert run(capsys, "upgrade", SOURCES[kind], tmp_path / "upgraded")[0] == 0
    theirs, ours = CheckpointState.load_checkpoint(tmp_path / "upgraded"), toc.load(SOURCES[kind])
    assert {name for name, _ in theirs.parameters} == set(ours.parameters)
    for name, parameter in theirs.parameters:
        assert parameter.data.tobytes() == ours.parameters[name].numpy().tobytes()
    assert toc.load(tmp_path / "upgraded").optimizer == ours.optimizer


def test_upgrade_in_place_works_for_files_and_asks_for_a_name_for_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(SOURCES["ortcp"], tmp_path / "checkpoint")
    assert run(capsys, "upgrade", tmp_path / "checkpoint", "--overwrite")[0] == 0
    assert toc.detect(tmp_path / "checkpoint") == "ort"
    assert toc.load(tmp_path / "checkpoint") == toc.load(SOURCES["ortcp"])
    shutil.copytree(SOURCES["pbseq"], tmp_path / "folder")
    code, _, err = run(capsys, "upgrade", tmp_path / "folder", "--overwrite")
    assert code == 2
    assert "DST" in err
    assert toc.detect(tmp_path / "folder") == "pbseq"


def test_merge_takes_files_in_any_order_a_folder_or_a_glob(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = toc.load(SET.folder)
    files = [SET.folder / file for file in SET.json["checkpoint"]]
    for number, ranks in enumerate((files[::-1], [SET.folder], [f"{SET.folder}/*.ortcp"])):
        assert run(capsys, "merge", *ranks, tmp_path / f"{number}")[0] == 0
        assert toc.load(tmp_path / f"{number}") == whole
    code, _, err = run(capsys, "merge", *files[1:], tmp_path / "x")
    assert code == 2
    assert "rank 0 of 4 is missing" in " ".join(err.split())
    code, _, err = run(capsys, "upgrade", files[0], tmp_path / "piece")
    assert code == 0
    assert "one rank of a partitioned set" in " ".join(err.split())
    code, _, err = run(capsys, "merge", files[0], tmp_path / "x")
    assert code == 2
    assert "of 4 is missing" in " ".join(err.split())
    assert run(capsys, "merge", tmp_path / "x")[0] == 2
    assert toc.merge(SET.folder) == toc.merge(f"{SET.folder}/*.ortcp") == whole


def test_split_and_merge_undo_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = toc.load(SET.folder)
    (tmp_path / "plan.json").write_text('{"data_parallel_size": 2, "horizontal_parallel_size": 2, "columns": ["h.0.mlp.fc.weight"]}')
    assert run(capsys, "split", SET.folder, tmp_path / "grid", "--plan", tmp_path / "plan.json")[0] == 0
    assert sorted(place.name for place in (tmp_path / "grid").iterdir()) == [f"rank_{rank}.ortcp" for rank in range(4)]
    assert toc.load(tmp_path / "grid") == whole
    assert run(capsys, "split", tmp_path / "grid", tmp_path / "two", "--plan", '{"data_parallel_size": 2}', "--to", "pbseq")[0] == 0
    assert run(capsys, "merge", tmp_path / "two", tmp_path / "again.ortcp")[0] == 0
    assert toc.load(tmp_path / "again.ortcp") == whole
    assert (
        run(capsys, "split", SET.folder, tmp_path / "two", "--plan", '{"data_parallel_size": 3}')[0] == 2
    )  # ranks of another set are there
    assert run(capsys, "split", SET.folder, tmp_path / "x", "--plan", "{nonsense")[0] == 2
    assert run(capsys, "split", SET.folder, tmp_path / "x", "--plan", tmp_path / "nowhere.json")[0] == 2


def test_stages_that_do_not_say_their_place_are_merged_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = toc.load(SOURCES["ortcp"])
    for number, names in enumerate((("fc1.weight", "fc1.bias"), ("fc2.weight", "fc2.bias"))):
        group = toc.OptimizerGroup(
            state.step, states={name: state.optimizer["group0"].states[name] for name in names if name in state.trainable}
        )
        stage = toc.CheckpointState(
            {name: state.trainable[name] for name in names if name in state.trainable},
            {name: state.frozen[name] for name in names if name in state.frozen},
            {"group0": group},
            state.properties,
        )
        toc.save(stage, tmp_path / f"stage{number}")
    assert run(capsys, "merge", "--stages", tmp_path / "stage0", tmp_path / "stage1", tmp_path / "whole")[0] == 0
    assert toc.load(tmp_path / "whole") == state
