"""Lightning with ORT checkpoints: the Trainer's own checkpoints become folders without pickles, and an ORT checkpoint lies beside them.

python examples/lightning_mnist_like.py            (pip install 'torch-ort-ckpt[lightning]')
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_ort_ckpt as toc
from torch_ort_ckpt.integrations.lightning import OrtCheckpoint, OrtCheckpointIO


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 10))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def images(count: int = 640) -> TensorDataset:
    """Ten patterns of 8 x 8 pixels under noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 1, 8, 8, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return TensorDataset(patterns[labels] + 0.3 * torch.randn(count, 1, 8, 8, generator=generator), labels)


def trainer(folder: Path, epochs: int) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        accelerator="cpu",
        plugins=[OrtCheckpointIO()],  # what Trainer.save_checkpoint and resuming use
        callbacks=[OrtCheckpoint(dirpath=folder / "ort", monitor="loss", filename="best", enable_version_counter=False)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main(folder: Path) -> tuple[int, toc.CheckpointState]:
    """The step after resuming, and the state in the ORT checkpoint."""
    torch.manual_seed(0)
    loader = DataLoader(images(), batch_size=32)
    first = trainer(folder, epochs=1)
    first.fit(Digits(), loader)
    first.save_checkpoint(folder / "epoch1.ckpt")

    second = trainer(folder, epochs=3)
    second.fit(Digits(), loader, ckpt_path=folder / "epoch1.ckpt")  # goes on at epoch 1
    state = toc.load(folder / "ort" / "best.ortckpt")
    print(f"step {second.global_step}, loss {float(second.callback_metrics['loss']):.4f}; best.ortckpt: {state}")
    return second.global_step, state


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place))
