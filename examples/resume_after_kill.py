"""A training process is killed in the middle of a step; started again it goes on, and ends with the weights of a run that was never killed.

python examples/resume_after_kill.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_ort_ckpt as toc

STEPS = 60


def train(folder: Path, kill_at: int | None = None) -> nn.Module:
    """One process's life. It need not know whether it is the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=16, shuffle=True)

    def perhaps_die(event: object) -> None:
        if getattr(event, "step", None) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)  # no warning, no clean-up

    config = toc.RunnerConfig(
        num_train_steps=STEPS,
        checkpoints_dir=folder,
        checkpoint_period=10,
        max_num_checkpoints=2,
        lr=toc.LearningRate(initial=1e-2),
        progress_bar=False,
    )
    loss = nn.CrossEntropyLoss()
    runner = toc.TrainingRunner(model, optimizer, config, loss=lambda net, batch: loss(net(batch[0]), batch[1]), callbacks=[perhaps_die])
    result = runner.run(loader)
    print(f"{folder.name}: step {result.step}, resumed from {result.resumed_from}, loss {result.loss:.4f}", flush=True)
    return model


def main(folder: Path) -> tuple[int, bool]:
    """How the killed process ended, and whether the two runs are equal."""
    command = [sys.executable, __file__, str(folder / "killed"), "37"]
    ended = subprocess.run(command, check=False).returncode
    left = sorted(path.name for path in (folder / "killed").glob("checkpoint_*"))
    print(f"the process ended with {ended} (SIGKILL); its checkpoints: {left}")
    resumed = train(folder / "killed")
    whole = train(folder / "never_killed")
    equal = all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))
    print("the weights are equal bit for bit" if equal else "THE WEIGHTS DIFFER")
    return ended, equal


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as place:
            main(Path(place))
