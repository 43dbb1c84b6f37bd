"""Only `toc.save` replaces a file without being asked, as `torch.save` does. Every other function and command wants `overwrite`."""

from __future__ import annotations

import argparse
import functools
import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.truth import DATA
from torch_ort_ckpt import report
from torch_ort_ckpt.cli import main
from torch_ort_ckpt.cli.parser import build_parser
from torch_ort_ckpt.training.runner import TrainingRunner

FOLDER = DATA / "fbv2_ort1_19_2_adamw_full"
CHECKPOINT = FOLDER / "checkpoint"


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3))


def train(path: Path, overwrite: bool, name: str) -> None:
    model = net()
    place = path if name == "export_path" else path.parent
    config = toc.RunnerConfig(1, progress_bar=False, overwrite=overwrite, **{name: place})
    batches = [(torch.randn(2, 4), torch.tensor([0, 1]))]
    TrainingRunner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        config,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        export=lambda model, path: path.write_bytes(b"exported"),
    ).run(batches)


@functools.cache
def made_by_torch() -> toc.Artifacts:
    return toc.export_artifacts(net(), (torch.randn(2, 4),), Path(tempfile.mkdtemp()) / "artifacts", builder="torch")


FUNCTIONS: dict[str, tuple[str, Callable[[Path, bool], Any]]] = {
    "convert": ("model.safetensors", lambda path, again: toc.convert(CHECKPOINT, path, overwrite=again)),
    "export_artifacts": (
        "training_model.onnx",
        lambda path, again: toc.export_artifacts(net(), (torch.randn(2, 4),), path.parent, exporter="torchscript", overwrite=again),
    ),
    "export_step_model": ("step_model.onnx", lambda path, again: toc.export_step_model(made_by_torch(), path.parent, overwrite=again)),
    "rebuild_artifacts": ("training_model.onnx", lambda path, again: toc.rebuild_artifacts(FOLDER, path.parent, overwrite=again)),
    "export_executorch": ("model.pte", lambda path, again: toc.export_executorch(made_by_torch(), path, overwrite=again)),
    "OrtModule.export_inference": (
        "inference.onnx",
        lambda path, again: toc.OrtModule(FOLDER, engine="torch").export_inference(path, overwrite=again),
    ),
    "to_torch_module(source=)": ("model.py", lambda path, again: toc.to_torch_module(FOLDER, source=path, overwrite=again)),
    "report.write": ("page.html", lambda path, again: report.write(report.inspection(CHECKPOINT), path, overwrite=again)),
    "RunnerConfig(export_path=)": ("exported", lambda path, again: train(path, again, "export_path")),
    "RunnerConfig(perf_output_dir=)": ("perf_metrics.json", lambda path, again: train(path, again, "perf_output_dir")),
}


MARKS = {"export_artifacts": [pytest.mark.ort], "export_executorch": [pytest.mark.executorch]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, [])) for name in FUNCTIONS])
def test_a_function_replaces_a_file_only_when_asked(name: str, tmp_path: Path) -> None:
    file, run = FUNCTIONS[name]
    path = tmp_path / file
    path.write_bytes(b"precious")
    with pytest.raises(toc.CheckpointError, match=r"already[\s\S]*overwrite=True"):
        run(path, False)
    assert path.read_bytes() == b"precious"
    assert [found.name for found in tmp_path.iterdir()] == [file]
    run(path, True)
    assert path.read_bytes() != b"precious"


def test_every_public_function_that_replaces_files_is_tested() -> None:
    functions = {name for name in toc.__all__ if inspect.isfunction(getattr(toc, name))}
    having = {name for name in functions if "overwrite" in inspect.signature(getattr(toc, name)).parameters}
    assert {name for name in functions if name.startswith("export_")} <= having
    assert having - {"save"} <= {name.partition("(")[0] for name in FUNCTIONS}
    assert all(inspect.signature(getattr(toc, name)).parameters["overwrite"].default is (name == "save") for name in having)


COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "convert": lambda path: ["convert", str(CHECKPOINT), path],
    "average": lambda path: ["average", str(CHECKPOINT), str(CHECKPOINT), "-o", path],
    "inspect": lambda path: ["inspect", str(CHECKPOINT), "--html", path],
    "diff": lambda path: ["diff", str(CHECKPOINT), str(CHECKPOINT), "--html", path],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_replaces_a_file_only_when_asked(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.safetensors"
    path.write_bytes(b"precious")
    command = COMMANDS[name](str(path))
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert path.read_bytes() == b"precious"
    assert main([*command, "--overwrite"]) == 0
    assert path.read_bytes() != b"precious"


def test_every_command_that_writes_has_the_option() -> None:
    """`train` has it in its configuration file, with the other settings of the run."""
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    destinations = {"destination", "output", "html", "folder"}
    for name, parser in commands.choices.items():
        options = {action.dest for action in parser._actions}
        assert not options & destinations or "overwrite" in options, name


def test_a_resumed_run_replaces_its_own_results(tmp_path: Path) -> None:
    model = net()
    settings: dict[str, Any] = {"checkpoints_dir": tmp_path / "checkpoints", "export_path": tmp_path / "exported", "progress_bar": False}
    batches = [(torch.randn(2, 4), torch.tensor([0, 1]))]

    def run(steps: int, **more: Any) -> None:
        TrainingRunner(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            toc.RunnerConfig(steps, **settings, **more),
            loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            export=lambda model, path: path.write_text(str(steps)),
        ).run(batches)

    run(1)
    run(2)
    assert (tmp_path / "exported").read_text() == "2"
    with pytest.raises(toc.CheckpointError, match="exists already"):
        run(3, resume=False)
    assert (tmp_path / "exported").read_text() == "2"


def test_save_replaces_as_torch_save_does(tmp_path: Path) -> None:
    state = toc.CheckpointState(trainable={"w": torch.ones(2)})
    (tmp_path / "model.safetensors").write_bytes(b"old")
    toc.save(state, tmp_path / "model.safetensors")
    assert toc.load(tmp_path / "model.safetensors") == state
    with pytest.raises(toc.CheckpointError, match="exists already"):
        toc.save(state, tmp_path / "model.safetensors", overwrite=False)
