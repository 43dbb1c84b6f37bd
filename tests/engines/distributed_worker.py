"""Run by two gloo processes under `torchrun`: FSDP2 with DCP, and a pipeline of two stages. Rank 0 writes what the tests compare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

import torch_ort_ckpt as toc
from tests.engines.zoo import FAMILIES

STEPS = 3
LR = 1e-2


def sharded(folder: Path) -> tuple[toc.OrtModule, toc.OrtOptimizer]:
    model = toc.OrtModule(folder, engine="torch")
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    assert all(isinstance(value, DTensor) for value in model.parameters())
    return model, toc.OrtOptimizer(model, lr=LR)


def step(model: toc.OrtModule, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Each rank takes its half of the batch."""
    rank = dist.get_rank()
    batch = [value.chunk(2)[rank] for value in FAMILIES["mlp"].batch(seed)]
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def fsdp(folder: Path) -> None:
    model, optimizer = sharded(folder)
    for seed in range(STEPS):
        step(model, optimizer, seed)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp")
    whole(model, folder / "after.pt")

    again, other = sharded(folder)
    weights, moments = get_state_dict(again, other)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder / "dcp")
    set_state_dict(again, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for resumed, with_it in ((model, optimizer), (again, other)):
        step(resumed, with_it, STEPS)
    whole(model, folder / "uninterrupted.pt")
    whole(again, folder / "resumed.pt")


def whole(model: torch.nn.Module, path: Path) -> None:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save(state, path)


def pipeline(folder: Path, kind: str) -> None:
    rank = dist.get_rank()
    pieces = toc.pipeline_stages(folder, 2)
    module = pieces.stages[rank]
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, eps=1e-3)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind](stage, n_microbatches=4, loss_fn=pieces.loss)
    for seed in range(STEPS):
        inputs, targets = pipeline_batch(seed)
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        optimizer.step()
        optimizer.zero_grad()
    toc.save(module.checkpoint(optimizer), folder / f"{kind}_stage{rank}")


def pipeline_batch(seed: int) -> list[torch.Tensor]:
    """Four micro-batches of the size that the transformer was exported with."""
    parts = [FAMILIES["transformer"].batch(10 * seed + part) for part in range(4)]
    return [torch.cat(values) for values in zip(*parts, strict=True)]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    fsdp(Path(sys.argv[1]))
    for schedule in ("gpipe", "1f1b"):
        pipeline(Path(sys.argv[2]), schedule)
    dist.destroy_process_group()
