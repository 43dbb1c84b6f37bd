"""Two gloo processes under `torchrun`: FSDP2 with DCP, and pipelines whose stages' checkpoints merge."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.engines.distributed_worker import LR, STEPS, pipeline_batch
from tests.engines.zoo import FAMILIES

pytestmark = pytest.mark.ort  # the artifacts are made by ORT's own tools

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def folders(exported: Callable[[str], tuple[Path, nn.Module]]) -> dict[str, Path]:
    """The artifacts' folders, with the results of the two processes (one run for all tests, since starting the processes takes longest)."""
    made = {name: exported(name)[0] for name in ("mlp", "transformer")}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.engines.distributed_worker",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    arguments = [*command, *(str(folder) for folder in made.values())]
    result = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return made


def test_fsdp2_trains_and_resumes_through_dcp(folders: dict[str, Path]) -> None:
    folder = folders["mlp"]
    alone = toc.OrtModule(folder, engine="torch")
    optimizer = toc.OrtOptimizer(alone, lr=LR)
    for seed in range(STEPS):
        alone(*FAMILIES["mlp"].batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    after, uninterrupted, resumed = (torch.load(folder / f"{name}.pt") for name in ("after", "uninterrupted", "resumed"))
    torch.testing.assert_close(after, dict(alone.state_dict()), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)
    assert any(not torch.equal(after[key], resumed[key]) for key in after)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_trains_and_its_stages_merge(schedule: str, folders: dict[str, Path]) -> None:
    folder = folders["transformer"]
    whole = toc.merge([folder / f"{schedule}_stage{rank}" for rank in range(2)], stages=True)

    model = toc.OrtModule(folder, engine="torch")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, eps=1e-3)
    for seed in range(STEPS):
        inputs, targets = (value.chunk(4) for value in pipeline_batch(seed))
        for part in range(4):
            (model(inputs[part], targets[part]) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert whole.parameters.keys() == model.artifacts.state.parameters.keys()
    assert whole.optimizer["group0"].step == STEPS
    assert whole.optimizer["group0"].states.keys() == model.artifacts.state.trainable.keys()
    tensors = model.named_tensors()
    for name, value in whole.parameters.items():
        torch.testing.assert_close(value, tensors[name].detach(), rtol=1e-5, atol=1e-6)
    again = toc.OrtModule(folder, engine="torch")
    again.load_checkpoint(whole)
    batch = FAMILIES["transformer"].batch(99)
    torch.testing.assert_close(again(*batch), model(*batch), rtol=1e-5, atol=1e-6)


def test_stages_hold_about_equally_many_parameters(exported: Callable[[str], tuple[Path, nn.Module]]) -> None:
    folder, _ = exported("transformer")
    whole = sum(value.numel() for value in toc.Artifacts.load(folder).state.trainable.values())
    for count in (2, 3):
        sizes = [sum(value.numel() for value in stage.parameters()) for stage in toc.pipeline_stages(folder, count).stages]
        assert sum(sizes) == whole
        assert max(sizes) < 1.5 * whole / count
    with pytest.raises(toc.CheckpointError, match="can't be cut into 90 stages"):
        toc.pipeline_stages(folder, 90)
