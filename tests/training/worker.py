"""A training that the tests start as real processes: `torchrun ... -m tests.training.worker DIRECTORY STEPS [options]`.

Prints one JSON line from the first rank at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torch_ort_ckpt as toc
from tests.training.setups import data, data_for, graph, plain
from torch_ort_ckpt.checkpoint.training_graph import unwrap
from torch_ort_ckpt.training import distributed
from torch_ort_ckpt.training.runner import Event
from torch_ort_ckpt.training.sampler import ResumableSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("steps", type=int)
    parser.add_argument("--kind", default="plain", choices=("plain", "graph", "zero", "fsdp"))
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--period", type=int, default=2)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--die", type=int, help="rank 1 is killed in the save of this step")
    parser.add_argument("--term", type=int, help="the last rank gets SIGTERM at this step")
    parser.add_argument("--fail", type=int, help="the last rank raises at this step")
    parser.add_argument("--plain-loader", action="store_true", help="an ordinary shuffling loader, which the runner must shard")
    parser.add_argument("--dcp", help="write the trained state here, all ranks together")
    parser.add_argument("--on-save-error", default="raise")
    options = parser.parse_args()
    torch.set_num_threads(1)
    distributed.start()
    model, optimizer = make(options.kind)
    loader = feed(options, model)
    config = toc.RunnerConfig(
        options.steps,
        gradient_accumulation_steps=options.accumulate,
        checkpoints_dir=options.directory,
        checkpoint_period=options.period,
        max_num_checkpoints=options.keep,
        async_save=options.async_save,
        on_save_error=options.on_save_error,
        lr=toc.LearningRate(0.01, "linear", 0.2),
    )
    if options.die is not None and distributed.rank() == 1:
        kill_in_save(options.die)

    def watch(event: Event) -> None:
        if distributed.rank() == distributed.world_size() - 1 and event.kind == "step":
            if event.step == options.term:
                os.kill(os.getpid(), signal.SIGTERM)
            if event.step == options.fail:
                raise ValueError("this rank has had enough")

    loss = None if options.kind == "graph" else cross_entropy
    result = toc.TrainingRunner(model, optimizer, config, loss=loss, callbacks=[watch]).run(loader)
    if options.dcp:
        toc.save(toc.from_torch(unwrap(model), optimizer), options.dcp, format="dcp")
    values = full_parameters(model)
    if distributed.rank() == 0:
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for _, value in sorted(values.items()))).hexdigest()
        total = float(sum(value.double().abs().sum() for value in values.values()))
        print(
            json.dumps(
                {"digest": digest, "total": total, "step": result.step, "resumed": result.resumed_from, "preempted": result.preempted}
            )
        )
    if dist.is_initialized():
        dist.destroy_process_group()


def make(kind: str) -> tuple[Any, Any]:
    if kind == "graph":
        setup = graph()
        return setup.model, setup.optimizer
    model = plain().model
    model[2] = nn.Identity()  # no dropout: ranks draw differently, and other numbers of ranks are compared
    model[1] = nn.LayerNorm(16)
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def feed(options: argparse.Namespace, model: Any) -> Any:
    if options.plain_loader:
        return data(count=48, batch_size=options.batch)
    sampler = ResumableSampler(48, seed=3)
    if options.kind == "graph":
        from tests.training.setups import Setup

        return data_for(Setup(model, None, None), count=48, batch_size=options.batch, shuffle=None, sampler=sampler)  # type: ignore[arg-type]
    return data(count=48, batch_size=options.batch, shuffle=None, sampler=sampler)


def cross_entropy(model: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    found = unwrap(model).state_dict()
    return {name: getattr(value, "full_tensor", lambda value=value: value)().detach().clone() for name, value in found.items()}


def kill_in_save(step: int) -> None:
    """This rank dies after it has written its part of the entry, before the ranks have agreed that all are done."""
    from torch_ort_ckpt.training import manager
    from torch_ort_ckpt.training.entry import write_tree

    whole = write_tree

    def dying(folder: Any, *args: Any, **more: Any) -> Any:
        result = whole(folder, *args, **more)
        if f"checkpoint_{step}." in folder.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    vars(manager)["write_tree"] = dying


if __name__ == "__main__":
    main()
