"""The command line: real processes where that matters, otherwise `main` in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from tests.truth import Truth
from torch_ort_ckpt.cli import completion, demo, main

ADAMW = str(Truth("fbv2_ort1_19_2_adamw_full").checkpoint)
OLD = str(Truth("fbv1_ort1_16_3_adamw_full").checkpoint)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_module_and_script_are_the_same(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-m", "torch_ort_ckpt", "--help"], capture_output=True, text=True, check=True)
    for command in ("inspect", "convert", "upgrade", "diff", "verify", "average"):
        assert command in result.stdout
    script = Path(sys.executable).with_name("torch-ort-ckpt")
    if script.exists():
        assert subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout == result.stdout


def test_inspect_shows_everything(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", ADAMW)
    assert code == 0
    for part in (
        "ort version 2",
        "fc1.weight",
        "16x12",
        "768 B",
        "trainable",
        "frozen",
        "momentum0 momentum1",
        "кириллица",
        "-9223372036854775808",
    ):
        assert part in out
    assert "\x1b" not in out  # no colours in a pipe


def test_inspect_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "inspect", ADAMW, "--json")
    content = json.loads(out)
    assert content["groups"]["group0"]["step"] == 5
    tensors = {item["name"]: item for item in content["tensors"]}
    assert tensors["fc1.weight"]["shape"] == [16, 12]
    assert tensors["fc1.weight"]["statistics"]["nan"] == 0
    _, out, _ = run(capsys, "inspect", ADAMW, "--json", "--no-stats")
    assert json.loads(out)["tensors"][0]["statistics"] is None


@pytest.mark.parametrize("name", ["nominal", "strings", "blank", "props_only", "dtypes", "initial_half"])
def test_inspect_takes_every_kind(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "inspect", Truth(f"fbv2_ort1_19_2_{name}").checkpoint)[0] == 0


def test_convert_diff_and_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "convert", ADAMW, tmp_path / "m.safetensors")[0] == 0
    assert run(capsys, "convert", tmp_path / "m.safetensors", tmp_path / "back")[0] == 0
    code, out, _ = run(capsys, "diff", ADAMW, tmp_path / "back")
    assert (code, out.split(":")[0]) == (0, "equal")
    code, out, _ = run(capsys, "diff", ADAMW, OLD.replace("adamw_full", "adamw_sched"))
    assert code == 1
    assert "properties/epoch" in out
    code, out, _ = run(capsys, "diff", ADAMW, OLD.replace("adamw_full", "adamw_sched"), "--json")
    assert code == 1
    assert json.loads(out)["equal"] is False


def test_convert_options_reach_the_format(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "convert", ADAMW, tmp_path / "v1", "--version", 1)[0] == 0
    assert toc.load(tmp_path / "v1").format_version == 1
    assert run(capsys, "convert", ADAMW, tmp_path / "ext", "--external-data")[0] == 0
    assert (tmp_path / "ext.data").exists()
    assert run(capsys, "convert", ADAMW, tmp_path / "sharded", "--to", "safetensors", "--max-shard-size", "1KB")[0] == 0
    assert (tmp_path / "sharded/model.safetensors.index.json").exists()
    assert run(capsys, "convert", ADAMW, tmp_path / "half.pt", "--dtype", "fp16", "--no-optimizer")[0] == 0
    assert toc.load(tmp_path / "half.pt").trainable["fc1.weight"].dtype == torch.float16


def test_upgrade_makes_the_current_version(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    copy = tmp_path / "c"
    copy.write_bytes(Path(OLD).read_bytes())
    code, _, err = run(capsys, "upgrade", copy)
    assert code == 2
    assert "--overwrite" in err
    assert run(capsys, "upgrade", copy, "--overwrite")[0] == 0
    assert toc.load(copy).format_version == 2
    assert toc.load(copy) == toc.load(OLD)
    assert run(capsys, "upgrade", OLD, tmp_path / "d")[0] == 0


def test_verify_tells_good_from_bad(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "verify", ADAMW, OLD)[0] == 0
    (tmp_path / "cut").write_bytes(Path(ADAMW).read_bytes()[:-100])
    code, out, _ = run(capsys, "verify", ADAMW, tmp_path / "cut")
    assert code == 1
    assert "cut: module_state" in out
    code, out, _ = run(capsys, "verify", tmp_path / "cut", "--json")
    assert code == 1
    assert json.loads(out)[0]["ok"] is False


def test_average_with_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number in range(2):
        toc.save(toc.CheckpointState({"w": torch.full((2,), float(number))}), tmp_path / str(number))
    assert run(capsys, "average", tmp_path / "0", tmp_path / "1", "--weights", "1,3", "-o", tmp_path / "mean.safetensors")[0] == 0
    assert toc.load(tmp_path / "mean.safetensors").trainable["w"].tolist() == [0.75, 0.75]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{tmp}/nothing"], "no such file or folder"),
        (["inspect", "{tmp}"], "not a checkpoint in any known format"),
        (["convert", ADAMW, "{tmp}/a.xyz"], "can't tell a format"),
        (["convert", ADAMW, "{tmp}/no/such/folder/a"], "Create the folder first"),
        (["convert", ADAMW, "{tmp}/exists"], "--overwrite"),
        (["convert", ADAMW, "{tmp}/a.pt", "--version", "1"], "--version is for format 'ort'"),
        (["convert", ADAMW, "{tmp}/a.pt", "--name-map", "{tmp}/nothing"], "not a readable JSON file"),
        (["diff", ADAMW, "{tmp}/exists"], "not a checkpoint"),
        (["average", ADAMW, "-o", "{tmp}/exists"], "--overwrite"),
        (["average", ADAMW, OLD, "--weights", "1", "-o", "{tmp}/a"], "1 weights for 2"),
        (["upgrade", "{tmp}/exists", "{tmp}/a"], "not a checkpoint"),
    ],
)
def test_errors_say_what_and_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "exists").write_text("something else")
    code, out, err = run(capsys, *(argument.format(tmp=tmp_path) for argument in arguments))
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert (tmp_path / "exists").read_text() == "something else"


@pytest.mark.parametrize(
    "arguments", [[], ["unknown"], ["average", ADAMW, "-o", "x", "--weights", "a,b"], ["convert", ADAMW, "x", "--max-shard-size", "-3"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_warnings_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number in range(2):
        toc.save(toc.CheckpointState({"w": torch.zeros(1)}, properties={"n": number}), tmp_path / str(number))
    code, _, err = run(capsys, "average", tmp_path / "0", tmp_path / "1", "-o", tmp_path / "m")
    assert code == 0
    assert err == "warning: properties that differ between the inputs are left out: n\n"


def test_hostile_names_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    toc.save(toc.CheckpointState({"\x1b[31mred\x07[bold]": torch.zeros(1)}, properties={"p\x1b]0;": "v\x1b[2J"}), tmp_path / "c")
    _, out, _ = run(capsys, "inspect", tmp_path / "c")
    assert "\x1b" not in out
    assert "[bold]" in out


def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    state = toc.CheckpointState({f"w{number}": torch.zeros(1) for number in range(3000)})
    toc.save(state, tmp_path / "c")
    command = f"{sys.executable} -m torch_ort_ckpt inspect {tmp_path}/c | head -n 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.ort
def test_demo_does_the_main_job(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "demo", tmp_path)
    assert code == 0
    assert "all equal bit for bit" in out
    assert toc.load(tmp_path / "final").step == 3 * demo.STEPS
    plain, theirs = (toc.load(tmp_path / name) for name in ("from_pytorch", "trained_on"))  # the same steps in PyTorch and in ORT
    assert all(torch.allclose(value, theirs.trainable[name], atol=1e-5) for name, value in plain.trainable.items())
    before = (tmp_path / "training_model.onnx").read_bytes(), (tmp_path / "final").stat().st_mtime_ns
    code, _, err = run(capsys, "demo", tmp_path)
    assert code == 2
    assert "--overwrite" in err
    assert before == ((tmp_path / "training_model.onnx").read_bytes(), (tmp_path / "final").stat().st_mtime_ns)
    for name in demo.RESULTS:
        (tmp_path / name).unlink()
    assert run(capsys, "demo", tmp_path)[0] == 2  # artifacts alone are not replaced either
    assert run(capsys, "demo", tmp_path, "--overwrite")[0] == 0


def test_demo_says_what_it_needs(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run(capsys, "demo", tmp_path)
    assert code == 2
    assert "torch-ort-ckpt[ort]" in err


def test_completion_completes_commands_options_choices_and_files(tmp_path: Path) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "torch_ort_ckpt", "completion", "bash"], capture_output=True, text=True, check=True
    ).stdout
    (tmp_path / "checkpoint").touch()

    def complete(*words: str) -> set[str]:
        line = " ".join(f'"{word}"' for word in words)
        code = f"""source /dev/stdin; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}
            function=$(complete -p torch-ort-ckpt | sed 's/.* -F \\([^ ]*\\).*/\\1/'); $function; printf '%s\\n' ${{COMPREPLY[@]}}"""
        found = subprocess.run(["bash", "-c", code], input=printed, capture_output=True, text=True, check=True, cwd=tmp_path)
        return set(found.stdout.split())

    assert complete("torch-ort-ckpt", "in") == {"inspect"}
    assert complete("torch-ort-ckpt", "convert", "--no-o") == {"--no-optimizer"}
    assert complete("torch-ort-ckpt", "convert", "--to", "safe") == {"safetensors"}
    assert complete("torch-ort-ckpt", "inspect", "che") == {"checkpoint"}
    assert complete("torch-ort-ckpt", "convert", "--name-map", "che") == {"checkpoint"}


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completion_knows_every_command_in_every_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = run(capsys, "completion", shell)
    assert code == 0
    for name in ("inspect", "convert", "checkpoints", "no-optimizer", "safetensors"):
        assert name in printed
