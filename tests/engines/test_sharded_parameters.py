"""DTensors (FSDP2, tensor parallelism) and engine "ort", which needs every parameter whole in the memory of the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import exported

pytestmark = pytest.mark.ort

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
import torch_ort_ckpt as toc

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x, labels = torch.randn(4, 12), torch.tensor([0, 1, 2, 3])


def attempt(name, function):
    try:
        function()
    except toc.CheckpointError as error:
        assert any(way in str(error) for way in ('engine="torch"', "fused=True", "loss.backward()")), error
        print(name, "refused", flush=True)
    else:
        print(name, "ran", flush=True)


def new():
    return toc.OrtModule(sys.argv[1], engine="ort", threads=1)


def sharded(placement):
    model = new()
    for owner in (model.fc1, model.fc2):
        owner.weight = nn.Parameter(distribute_tensor(owner.weight.detach(), mesh, [placement]))
    return model


for placement in (Shard(0), Replicate()):
    model = sharded(placement)
    assert isinstance(model.fc1.weight, DTensor)
    attempt("forward", lambda: model.train()(x, labels).backward())
    attempt("train_step", lambda: model.train_step(x, labels))
    attempt("eval", lambda: model.eval()(x, labels))
model = new()
fully_shard(model, mesh=mesh)
attempt("fsdp2 train_step", lambda: model.train_step(x, labels))
model(x, labels).backward()  # FSDP2 gathers the parameters around a forward
plain = new()
plain(x, labels).backward()
for one, other in zip(model.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(one.grad.full_tensor(), other.grad)
optimizer = toc.OrtOptimizer(model, fused=False)
attempt("fsdp2 step", optimizer.step)
model = sharded(Shard(0))
optimizer = toc.OrtOptimizer(model, fused=False)
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
attempt("step", optimizer.step)
attempt("input", lambda: new()(distribute_tensor(x, mesh, [Shard(0)]), labels))
attempt("whole", lambda: new()(x, labels).backward())
"""

EXPECTED = [
    *(f"{name} refused" for _ in range(2) for name in ("forward", "train_step", "eval")),
    "fsdp2 train_step refused",
    "fsdp2 step refused",
    "step refused",
    "input refused",
    "whole ran",
]


def test_sharded_parameters_and_inputs_are_refused_and_nothing_crashes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(exported("mlp").folder)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.stdout.splitlines() == EXPECTED, done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]
