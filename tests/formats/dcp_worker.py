"""Run by `test_dcp_hostile.py`: FSDP2 over two and over four processes writes DCP folders, with what they must hold beside them.

python -m tests.formats.dcp_worker FOLDER
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def save(folder: Path, rank: int, ranks: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{ranks}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))  # sizes that no number of ranks divides
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.rand(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    square = torch.arange(48.0).reshape(8, 6)
    grid = init_device_mesh("cpu", (2, ranks // 2))
    extra = {
        "rows": distribute_tensor(square, mesh, [Shard(0)]),
        "columns": distribute_tensor(square, mesh, [Shard(1)]),
        "boxes": distribute_tensor(square, grid, [Shard(0), Shard(1)]),
        "everywhere": distribute_tensor(square, mesh, [Replicate()]),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
    }
    dcp.save({"model": {**weights, **extra}, "optim": moments, "epoch": 3}, checkpoint_id=folder / f"ranks{ranks}")
    full, _ = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        plain = {"rows": square, "columns": square, "boxes": square, "everywhere": square, "scalar": extra["scalar"], "none": extra["none"]}
        torch.save({**full, **plain}, folder / f"truth{ranks}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> None:
    for ranks in (2, 4):
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                try:
                    save(folder, rank, ranks)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            raise SystemExit(f"a rank of {ranks} failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
