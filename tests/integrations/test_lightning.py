"""Lightning with a real `Trainer`: save, new Trainer, resume, equality; for `lightning` and `pytorch_lightning`."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.training.setups import ADAMW, assert_equal, data, data_for, graph

ROOT = Path(__file__).parents[2]
PACKAGES = [name for name in ("lightning", "pytorch_lightning") if importlib.util.find_spec(name)]
pytestmark = [
    pytest.mark.skipif(not PACKAGES, reason="needs lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("error::torch_ort_ckpt.CheckpointWarning"),
]


def pytorch(package: str) -> Any:
    return importlib.import_module({"lightning": "lightning.pytorch"}.get(package, package))


def module(pl: Any, seed: int = 0, ort: bool = False) -> Any:
    torch.manual_seed(seed)

    class Plain(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 16})
            self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))

        def training_step(self, batch: Any, index: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    class Graph(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = toc.OrtModule(ADAMW, threads=1)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.net(*batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return toc.OrtOptimizer(self.net, lr=0.01)

    return Graph() if ort else Plain()


def trainer(pl: Any, folder: Path, epochs: int, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
    return pl.Trainer(default_root_dir=folder, max_epochs=epochs, **{**quiet, **options})


def loader(ort: bool) -> Any:
    return data_for(graph(), shuffle=False) if ort else data(shuffle=False)


@pytest.mark.parametrize("ort", [False, pytest.param(True, marks=pytest.mark.ort)], ids=["plain", "graph"])
@pytest.mark.parametrize("package", PACKAGES)
def test_a_new_trainer_goes_on_from_an_ort_checkpoint(package: str, ort: bool, tmp_path: Path) -> None:
    from torch_ort_ckpt.integrations.lightning import classes

    pl = pytorch(package)
    kind, callback = classes(package)
    whole = module(pl, 0, ort)
    torch.manual_seed(1)
    trainer(pl, tmp_path, 4, enable_checkpointing=False).fit(whole, loader(ort))

    torch.manual_seed(0)
    first = module(pl, 0, ort)
    torch.manual_seed(1)
    start = trainer(pl, tmp_path, 2, plugins=[kind()], callbacks=[callback(tmp_path / "beside", save_top_k=0)])
    start.fit(first, loader(ort))
    generator = torch.get_rng_state()
    start.save_checkpoint(tmp_path / "half.ckpt")
    assert (tmp_path / "half.ckpt" / "checkpoint").is_file()
    assert toc.load(tmp_path / "half.ckpt" / "checkpoint").step >= 20
    if ort:
        from onnxruntime.training import api

        api.CheckpointState.load_checkpoint(str(tmp_path / "half.ckpt" / "checkpoint"))

    second = module(pl, 9, ort)
    again = trainer(pl, tmp_path, 4, plugins=[kind()], enable_checkpointing=False)
    torch.set_rng_state(generator)  # Lightning itself keeps no random state
    again.fit(second, loader(ort), ckpt_path=str(tmp_path / "half.ckpt"))
    assert again.global_step == 40
    assert_equal(whole.state_dict(), second.state_dict())


@pytest.mark.parametrize("package", PACKAGES)
def test_it_reads_lightnings_own_files_and_works_in_the_background(package: str, tmp_path: Path) -> None:
    from torch_ort_ckpt.integrations.lightning import classes

    pl = pytorch(package)
    kind, _ = classes(package)
    plugins = importlib.import_module(f"{pl.__name__}.plugins.io")
    model = module(pl)
    plain = trainer(pl, tmp_path, 1, enable_checkpointing=False)
    plain.fit(model, data())
    plain.save_checkpoint(tmp_path / "theirs.ckpt")
    theirs = kind().load_checkpoint(tmp_path / "theirs.ckpt", weights_only=False)
    background = plugins.AsyncCheckpointIO(kind())
    saving = pl.callbacks.ModelCheckpoint(tmp_path / "kept", monitor="loss", save_top_k=1, save_last=True, every_n_train_steps=5)
    run = trainer(pl, tmp_path, 2, plugins=[background], callbacks=[saving])
    run.fit(
        model, data(), ckpt_path=str(tmp_path / "theirs.ckpt"), **({"weights_only": False} if "weights_only" in _fit_arguments(pl) else {})
    )
    names = sorted(place.name for place in (tmp_path / "kept").iterdir())
    assert "last.ckpt" in names
    assert len(names) >= 2  # Lightning may remove one before it was written in the background
    for name in names:
        mine = kind().load_checkpoint(tmp_path / "kept" / name)
        assert mine.keys() == theirs.keys()
        assert mine["hyper_parameters"] == {"width": 16}
        assert mine["optimizer_states"][0]["param_groups"][0]["params"] == theirs["optimizer_states"][0]["param_groups"][0]["params"]


def _fit_arguments(pl: Any) -> Any:
    import inspect

    return inspect.signature(pl.Trainer.fit).parameters


@pytest.mark.ort
@pytest.mark.parametrize("package", PACKAGES)
def test_the_callback_writes_ort_checkpoints_and_safetensors_beside(package: str, tmp_path: Path) -> None:
    from torch_ort_ckpt.integrations.lightning import classes

    pl = pytorch(package)
    _, callback = classes(package)
    ort = callback(tmp_path / "ort", filename="{step}", monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=4)
    tensors = callback(tmp_path / "st", format="safetensors", every_n_train_steps=5, save_top_k=-1)
    own = pl.callbacks.ModelCheckpoint(tmp_path / "pl")
    assert len({ort.state_key, tensors.state_key, own.state_key}) == 3
    model = module(pl, ort=True)
    run = trainer(pl, tmp_path, 2, callbacks=[ort, tensors, own])
    run.fit(model, loader(True))
    kept = sorted(place.name for place in (tmp_path / "ort").iterdir())
    assert len(kept) == 3
    assert "last.ortckpt" in kept
    last = toc.load(tmp_path / "ort" / "last.ortckpt")
    assert_equal(dict(last.trainable), {name: value.detach() for name, value in model.net.named_trainable().items()})
    assert last.properties["global_step"] == 20
    toc.OrtModule(toc.Artifacts.load(ADAMW, checkpoint=tmp_path / "ort" / "last.ortckpt"))
    weights = sorted((tmp_path / "st").glob("*[0-9].safetensors"))
    assert len(weights) == 4
    assert toc.load(weights[-1]).step == last.step
    assert list((tmp_path / "pl").glob("*.ckpt"))


SCRIPT = """
import json, sys, warnings, torch
warnings.simplefilter("ignore")
sys.path.insert(0, {root!r})
import lightning.pytorch as pl
from tests.integrations.test_lightning import module, trainer
from tests.training.setups import data
from torch_ort_ckpt.lightning import OrtCheckpoint, OrtCheckpointIO
folder, epochs, resume = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
callback = OrtCheckpoint(folder + "/ort", every_n_epochs=1, save_last=True)
run = trainer(pl, folder, epochs, devices=2, strategy="ddp", plugins=[OrtCheckpointIO()], callbacks=[callback])
model = module(pl, len(resume))
model.net[2] = torch.nn.Identity()
run.fit(model, data(shuffle=False), ckpt_path=resume[0] if resume else None)
run.save_checkpoint(folder + "/end.ckpt")
if run.is_global_zero:
    print(json.dumps(float(sum(v.double().abs().sum() for v in model.state_dict().values()))))
"""


@pytest.mark.skipif("lightning" not in PACKAGES, reason="needs lightning")
def test_two_processes_save_and_resume(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(SCRIPT.format(root=str(ROOT)))

    def run(*arguments: str) -> float:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(tmp_path / "run.py"), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return float(json.loads(done.stdout.splitlines()[-1]))

    whole = run(str(tmp_path / "a"), "2")
    run(str(tmp_path / "b"), "1")
    resumed = run(str(tmp_path / "b"), "2", str(tmp_path / "b" / "end.ckpt"))
    assert resumed == whole
    assert toc.load(tmp_path / "b" / "ort" / "last.ortckpt").properties["epoch"] == 1


def test_the_package_is_only_needed_for_this_module() -> None:
    code = "import torch_ort_ckpt, sys; sys.exit('lightning' in sys.modules)"
    with warnings.catch_warnings():
        subprocess.run([sys.executable, "-c", code], check=True)
