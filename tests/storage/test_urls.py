"""Everything that takes a path refuses a URL: written to as a path, it would become a local folder called `s3:`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.training.setups import ADAMW, data, plain
from torch_ort_ckpt import report
from torch_ort_ckpt.cli import main
from torch_ort_ckpt.cli import training as cli_training
from torch_ort_ckpt.operations import summarize as summary
from torch_ort_ckpt.operations.convert import read_name_map
from torch_ort_ckpt.storage.paths import refuse_url

URLS = ["s3://bucket/run", "gs://bucket/run", "memory://x", "file:///tmp/x", "https://host/x.pt", "hf+x.y-z://a", Path("s3://bucket/run")]
STATE = toc.CheckpointState(trainable={"w": torch.ones(2)})


def model() -> Any:
    return toc.OrtModule(ADAMW, engine="torch")


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "load": toc.load,
    "load with a format": lambda url: toc.load(url, format="ort"),
    "load of a list": lambda url: toc.load([url, url]),
    "load of a glob": lambda url: toc.load(f"{url}/*.ckpt") if isinstance(url, str) else toc.load(url / "*.ckpt"),
    "detect": toc.detect,
    "merge": toc.merge,
    "merge of a list": lambda url: toc.merge([url]),
    "verify": toc.verify,
    "verify with repair": lambda url: toc.verify(url, repair=True),
    "diff a": lambda url: toc.diff(url, STATE),
    "diff b": lambda url: toc.diff(STATE, url),
    "average": lambda url: toc.average([url, url]),
    "convert from": lambda url: toc.convert(url, "x.safetensors"),
    "convert to": lambda url: toc.convert(ADAMW / "checkpoint", url),
    "names": lambda url: toc.convert(ADAMW / "checkpoint", "x.safetensors", names=url),
    "name map": read_name_map,
    "plan": toc.PartitionPlan.from_json,
    "summary": summary.summarize,
    "page": lambda url: report.write({}, url),
    "artifacts": toc.Artifacts.load,
    "checkpoint of artifacts": lambda url: toc.Artifacts.load(ADAMW, checkpoint=url),
    "module": toc.OrtModule,
    "session": toc.TrainingSession,
    "stages": lambda url: toc.pipeline_stages(url, 2),
    "torch module": toc.to_torch_module,
    "source": lambda url: toc.to_torch_module(ADAMW, source=url),
    "export": lambda url: toc.export_artifacts(torch.nn.Linear(2, 2), torch.ones(1, 2), url),
    "inference": lambda url: model().export_inference(url),
    "load_checkpoint": lambda url: model().load_checkpoint(url),
    "manager": toc.CheckpointManager,
    "checkpoints_dir": lambda url: toc.RunnerConfig(2, checkpoints_dir=url),
    "checkpoint_to_load_path": lambda url: toc.RunnerConfig(2, checkpoint_to_load_path=url),
    "perf_output_dir": lambda url: toc.RunnerConfig(2, perf_output_dir=url),
    "export_path": lambda url: toc.RunnerConfig(2, export_path=url),
}
FUNCTIONS |= {f"save as {format}": lambda url, format=format: toc.save(STATE, url, format=format) for format in toc.formats.WRITABLE}
FUNCTIONS["save by name"] = lambda url: toc.save(STATE, url)


@pytest.fixture(autouse=True)
def nothing_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """In an empty working directory, which must be as empty afterwards."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert os.listdir(folder) == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_refuses_urls(name: str) -> None:
    for url in URLS:
        with pytest.raises(toc.CheckpointError, match=r"URL.*not supported yet"):
            FUNCTIONS[name](url)


COMMANDS = [
    ["inspect", "URL"],
    ["inspect", "LOCAL", "--html", "URL"],
    ["convert", "URL", "x.safetensors"],
    ["convert", "LOCAL", "URL"],
    ["convert", "LOCAL", "URL", "--to", "torch"],
    ["diff", "URL", "LOCAL"],
    ["diff", "LOCAL", "URL"],
    ["verify", "URL"],
    ["average", "LOCAL", "URL", "-o", "x"],
    ["average", "LOCAL", "LOCAL", "-o", "URL"],
    ["merge", "LOCAL", "URL"],
    ["merge", "URL", "x"],
    ["split", "LOCAL", "URL", "--plan", '{"data_parallel_size": 2}'],
    ["split", "LOCAL", "x", "--plan", "URL"],
    ["demo", "URL"],
    ["train", "URL"],
    ["resume", "URL"],
    ["checkpoints", "URL"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command))
def test_every_command_refuses_urls(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"URL": "s3://bucket/run", "LOCAL": str(ADAMW / "checkpoint")}
    assert main([parts.get(part, part) for part in command]) == 2
    assert "not supported yet" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("field", ["artifacts", "checkpoints_dir", "checkpoint_to_load_path", "export_path", "perf_output_dir"])
def test_a_configuration_file_with_a_url_is_refused(field: str, tmp_path: Path) -> None:
    """Relative paths in it are meant from its folder: a URL must not be taken for one."""
    content: dict[str, Any] = {"artifacts": str(ADAMW), "data": "module:function", "runner": {"num_train_steps": 2}}
    (content if field == "artifacts" else content["runner"])[field] = "s3://bucket/run"
    (tmp_path / "run.json").write_text(json.dumps(content))
    with pytest.raises(toc.CheckpointError, match=r"URL.*not supported yet"):
        cli_training.train(content, tmp_path)
    assert main(["train", str(tmp_path / "run.json")]) == 2


def test_lightning_refuses_urls() -> None:
    pytest.importorskip("lightning")
    import lightning.pytorch as pl

    from torch_ort_ckpt.integrations.lightning import classes

    io, callback = classes("lightning")
    for url in URLS:
        for action in (io().load_checkpoint, io().remove_checkpoint, lambda url: io().save_checkpoint({"state_dict": {}}, url)):
            with pytest.raises(toc.CheckpointError, match="URL"):
                action(url)
        with pytest.raises(toc.CheckpointError, match="URL"):
            callback(url)
        with pytest.raises(toc.CheckpointError, match="URL"):
            callback(dirpath=url)
        with pytest.raises(toc.CheckpointError, match="URL"):
            callback()._save_checkpoint(SimpleNamespace(is_global_zero=True), str(url).replace(":/b", "://b"))
    assert pl.__name__


def test_a_trainer_with_a_url_is_refused(tmp_path: Path) -> None:
    """Both ways: by the plugin, on a `ModelCheckpoint` of Lightning's own, and by our callback, whose folder comes from the Trainer."""
    pytest.importorskip("lightning")
    import lightning.pytorch as pl

    from torch_ort_ckpt.integrations.lightning import classes

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = plain().model

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    io, callback = classes("lightning")
    quiet: dict[str, Any] = {
        "max_steps": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    for options in (
        {"plugins": [io()], "callbacks": [pl.callbacks.ModelCheckpoint("memory://x")]},
        {"callbacks": [callback()], "default_root_dir": "memory://x"},
    ):
        with pytest.raises(toc.CheckpointError, match="URL"):
            pl.Trainer(**quiet, **options).fit(Module(), data())


@pytest.mark.parametrize(
    "path",
    [
        "C:\\x",
        "C:/x",
        "c://x",
        "a:b",
        "12:34:56.ckpt",
        "run:1/x",
        "run:/x",
        "./s3://x",
        "/s3://x",
        "://x",
        "x//y",
        "",
        Path("a:b"),
        Path("C:/x"),
    ],
)
def test_what_only_looks_like_a_url_is_a_path(path: Any) -> None:
    refuse_url(path)


@pytest.mark.posix  # Windows has no such names
def test_a_name_with_a_colon_is_used_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "epoch:1" / "12:30.ckpt"
    path.parent.mkdir()
    toc.save(STATE, path, format="ort")
    assert toc.load(path) == STATE
    toc.CheckpointManager(tmp_path / "run:1").save(1, torch.nn.Linear(2, 2))
    assert (tmp_path / "run:1" / "checkpoint_1").is_dir()
