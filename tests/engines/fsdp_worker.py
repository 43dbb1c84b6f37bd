"""Run by two gloo processes under `torchrun`: FSDP2 in mixed precision, and on parts of a model. Rank 0 writes the results to compare."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import torch_ort_ckpt as toc
from tests.engines.zoo import FAMILIES

STEPS = 3
LR = 1e-2
BFLOAT16: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


def by_parts(module: nn.Module, whole: bool, **options: Any) -> None:
    """Shard every layer, then the remaining parameters with the whole module."""
    for child in list(module.children()):
        if any(True for _ in child.parameters()):
            fully_shard(child, **options)
    if whole:
        fully_shard(module, **options)


WAYS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "whole": lambda model, mesh: fully_shard(model, mesh=mesh),
    "parts": lambda model, mesh: by_parts(model, True, mesh=mesh),
    "parts_kept": lambda model, mesh: by_parts(model, True, mesh=mesh, reshard_after_forward=False),
    "only_parts": lambda model, mesh: by_parts(model, False, mesh=mesh),
    "mixed": lambda model, mesh: fully_shard(model, mesh=mesh, **BFLOAT16),
    "mixed_parts": lambda model, mesh: by_parts(model, True, mesh=mesh, **BFLOAT16),
}


def train(model: nn.Module, loss_of: Callable[[list[torch.Tensor]], torch.Tensor]) -> list[float]:
    """Each rank takes its half of the batch; gradients are averaged."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses = []
    for seed in range(STEPS):
        batch = [value.chunk(2)[dist.get_rank()] for value in FAMILIES["mlp"].batch(seed)]
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def _loss_of_graph(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return model(*batch)


def _loss_of_module(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def whole(model: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def main(folder: Path, native_path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {}
    for name, shard in WAYS.items():
        model = toc.OrtModule(folder, engine="torch")
        shard(model, mesh)
        assert all(isinstance(value, DTensor) for value in model.parameters()), name
        losses = train(model, partial(_loss_of_graph, model))
        with torch.no_grad():
            evaluated = model.eval()(*FAMILIES["mlp"].batch(9))
        try:
            model.train().train_step(*FAMILIES["mlp"].batch(9))
            refusal = ""
        except toc.CheckpointError as error:
            refusal = str(error)
        found[name] = {"losses": losses, "state": whole(model), "eval": evaluated, "refusal": refusal}
        if name in ("whole", "mixed"):
            native = torch.load(native_path, weights_only=False)
            shard(native, mesh)
            losses = train(native, partial(_loss_of_module, native))
            found[f"native {name}"] = {"losses": losses, "state": whole(native)}
    if dist.get_rank() == 0:
        torch.save(found, folder / "fsdp.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    dist.destroy_process_group()
