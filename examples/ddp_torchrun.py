"""Two processes train ORT artifacts under torchrun with DistributedDataParallel (gloo, on the CPU), saving as they go.

python examples/ddp_torchrun.py                    (starts torchrun itself)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_ort_ckpt as toc


def worker(folder: Path) -> None:
    """What each rank runs: nothing here says how many there are."""
    model = toc.OrtModule(folder, threads=1)
    optimizer = toc.OrtOptimizer(model)
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=16, shuffle=True)
    config = toc.RunnerConfig(
        num_train_steps=40,
        checkpoints_dir=folder / "run",
        checkpoint_period=20,
        lr=toc.LearningRate(initial=1e-2),
        progress_bar=False,
    )
    result = toc.TrainingRunner(model, optimizer, config).run(loader)  # wraps the model in DDP, shares the data out
    weight = next(model.parameters()).detach().clone()
    everyone = [torch.zeros_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weight)
    if dist.get_rank() == 0:
        same = all(torch.equal(everyone[0], other) for other in everyone)
        print(f"{len(everyone)} ranks, step {result.step}, loss {result.loss:.4f}, weights {'equal' if same else 'DIFFERENT'} on all")
    dist.destroy_process_group()


def main(folder: Path) -> str:
    torch.manual_seed(0)
    toc.export_artifacts(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)), (torch.randn(2, 8),), folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    print(done.stdout.strip())
    print(f"checkpoints: {[entry.path.name for entry in toc.CheckpointManager(folder / 'run').list()]}")
    return done.stdout


if __name__ == "__main__":
    if "RANK" in os.environ:
        worker(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as place:
            main(Path(place))
