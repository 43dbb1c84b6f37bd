"""Run by `test_distributed.py` under torchrun: trains under DistributedDataParallel and saves what rank 0 ends with."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_ort_ckpt as toc
from tests.models import batch

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "no_sync": {},
}
STEPS = 6


def main(folder: Path, results: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    artifacts = toc.Artifacts.load(folder)
    for name, options in VARIANTS.items():
        model = toc.OrtModule(artifacts, threads=1)
        if rank == 1:
            with torch.no_grad():  # DDP must broadcast rank 0's values into the tensors the graph is bound to
                model.get_parameter("fc1.weight").zero_()
        parallel = DistributedDataParallel(model, **options)
        optimizer = toc.OrtOptimizer(parallel, lr=0.01)
        for step in range(STEPS):
            x, y = batch("mlp", size=8, seed=step)
            part = slice(rank * 8 // world, (rank + 1) * 8 // world)
            if name == "no_sync":
                first, second = slice(part.start, part.start + 2), slice(part.start + 2, part.stop)
                with parallel.no_sync():
                    (parallel(x[first], y[first]) / 2).backward()
                (parallel(x[second], y[second]) / 2).backward()
            else:
                parallel(x[part], y[part]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=name != "bucket_view")
        gathered = [torch.zeros_like(model.get_parameter("fc1.weight")) for _ in range(world)]
        dist.all_gather(gathered, model.get_parameter("fc1.weight").detach())
        assert torch.equal(gathered[0], gathered[1]), name
        if rank == 0:
            torch.save(dict(model.state_dict()), results / f"{name}.pt")
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
