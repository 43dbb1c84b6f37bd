"""Two processes under torchrun get the same parameters as one process on the joined batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from tests.models import batch, exported
from tests.runtime.ddp_worker import STEPS, VARIANTS

pytestmark = pytest.mark.ort_any

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.runtime.ddp_worker"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(exported("mlp").folder), str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_ddp_equals_the_joined_batch(results: Path, variant: str) -> None:
    model = toc.OrtModule(exported("mlp"), threads=1)
    optimizer = toc.OrtOptimizer(model, lr=0.01)
    for step in range(STEPS):
        model(*batch("mlp", size=8, seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = torch.load(results / f"{variant}.pt", weights_only=True)
    assert found.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-6)
