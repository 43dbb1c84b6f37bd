"""What reads Lightning's checkpoints besides the Trainer: `load_from_checkpoint`, Fabric, LightningCLI."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.models import batch, exported
from tests.training.setups import assert_equal, data

from .test_lightning import PACKAGES, pytorch, trainer

pytestmark = [
    pytest.mark.skipif(not PACKAGES, reason="needs lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("error::torch_ort_ckpt.CheckpointWarning"),
]


def kind(pl: Any) -> Any:
    class Net(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, width: int, folder: Path) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 3))

        def training_step(self, batch: Any, index: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Net


@pytest.mark.parametrize("package", PACKAGES)
def test_load_from_checkpoint_takes_a_folder_and_lightning_s_own_files(package: str, tmp_path: Path) -> None:
    from torch_ort_ckpt.integrations.lightning import classes

    pl = pytorch(package)
    plugin, _ = classes(package)
    net = kind(pl)
    for place, plugins in ((tmp_path / "folder.ckpt", [plugin()]), (tmp_path / "file.ckpt", [])):
        model = net(16, folder=Path("/some/where"))
        run = trainer(pl, tmp_path, 1, plugins=plugins, enable_checkpointing=False)
        run.fit(model, data())
        run.save_checkpoint(place)
        assert place.is_dir() == bool(plugins)
        loaded = net.load_from_checkpoint(str(place) if plugins else place, **({} if plugins else {"weights_only": False}))
        assert_equal(loaded.state_dict(), model.state_dict())
        assert loaded.hparams["width"] == 16
        assert loaded.hparams["folder"] == Path("/some/where")
        assert isinstance(loaded.hparams["folder"], Path)


@pytest.mark.skipif("lightning" not in PACKAGES, reason="needs lightning")
@pytest.mark.parametrize("two", [False, True], ids=["one module", "two modules"])
def test_fabric_writes_trainable_tensors_and_moments(two: bool, tmp_path: Path) -> None:
    import lightning

    from torch_ort_ckpt.integrations.lightning import classes

    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[classes("lightning")[0]()])
    torch.manual_seed(0)
    inner = nn.Linear(3, 2)
    model, optimizer = fabric.setup(inner, torch.optim.AdamW(inner.parameters()))
    fabric.backward(model(torch.randn(2, 3)).sum())
    optimizer.step()
    other = {"teacher": nn.Linear(2, 1)} if two else {}
    fabric.save(tmp_path / "saved.ckpt", {"model": model, "optimizer": optimizer, "step": 1, **other})
    state = toc.load(tmp_path / "saved.ckpt" / "checkpoint")
    prefix = "model." if two else ""
    assert torch.equal(state.trainable[f"{prefix}weight"], inner.weight)
    assert len(state.trainable) == (4 if two else 2)
    if not two:
        assert torch.equal(state.optimizer["group0"].states["weight"]["momentum0"], optimizer.state[inner.weight]["exp_avg"])
    expected = inner.weight.detach().clone()
    nn.init.zeros_(inner.weight)
    rest = fabric.load(tmp_path / "saved.ckpt", {"model": model, "optimizer": optimizer, **other})
    assert rest == {"step": 1}
    assert torch.equal(inner.weight, expected)


@pytest.mark.skipif("lightning" not in PACKAGES or not importlib.util.find_spec("jsonargparse"), reason="needs lightning and jsonargparse")
def test_artifacts_on_the_command_line_of_lightning(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.cli import LightningCLI

    class Net(pl.LightningModule):
        def __init__(self, artifacts: Path, engine: str = "torch", lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net, self.lr = toc.OrtModule(artifacts, engine=engine), lr

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(*batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    class Batches(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([batch("mlp")], batch_size=None)

    folder = exported("mlp").folder
    quiet = ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    place = ["--trainer.accelerator=cpu", "--trainer.max_epochs=2", f"--trainer.default_root_dir={tmp_path}"]
    command = ["fit", f"--model.artifacts={folder}", "--model.lr=0.5", *place, *quiet]
    plugin = ["--trainer.plugins+=torch_ort_ckpt.lightning.OrtCheckpointIO"]
    cli = LightningCLI(Net, Batches, args=command + plugin)
    mine = toc.OrtModule(folder, engine="torch")
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        mine(*batch("mlp")).backward()
        optimizer.step()
    assert_equal(cli.model.net.state_dict(), mine.state_dict())
    saved = next(tmp_path.rglob("*.ckpt"))
    assert saved.is_dir()
    again = Net.load_from_checkpoint(saved)
    assert_equal(again.net.state_dict(), mine.state_dict())
    assert again.hparams["artifacts"] == folder
