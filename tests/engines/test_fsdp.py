"""FSDP2 in two gloo processes: mixed precision and sharded submodules, against one process and against the native module."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.engines.fsdp_worker import LR, STEPS, WAYS
from tests.engines.zoo import FAMILIES

pytestmark = pytest.mark.ort  # the artifacts are made by ORT's own tools

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def found(exported: Callable[[str], tuple[Path, nn.Module]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, module = exported("mlp")
    native = tmp_path_factory.mktemp("native") / "module.pt"
    torch.save(module, native)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.engines.fsdp_worker"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run([*command, str(folder), str(native)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return {**torch.load(folder / "fsdp.pt", weights_only=False), "folder": folder}


@pytest.mark.parametrize("way", ["whole", "parts", "parts_kept", "only_parts"])
def test_sharded_parts_train_as_one_process_does(way: str, found: dict[str, Any]) -> None:
    alone = toc.OrtModule(found["folder"], engine="torch")
    optimizer = torch.optim.SGD(alone.parameters(), lr=LR, momentum=0.9)
    for seed in range(STEPS):
        alone(*FAMILIES["mlp"].batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(found[way]["state"], dict(alone.state_dict()), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[way]["eval"], alone.eval()(*FAMILIES["mlp"].batch(9)).detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[way]["state"], found["native whole"]["state"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["mixed", "mixed_parts"])
def test_mixed_precision_is_that_of_the_native_module(way: str, found: dict[str, Any]) -> None:
    native = found["native mixed"]
    assert found[way]["losses"] == pytest.approx(native["losses"], rel=1e-2)
    for name, value in native["state"].items():
        assert found[way]["state"][name].dtype is value.dtype is torch.float32
        torch.testing.assert_close(found[way]["state"][name], value, rtol=1e-2, atol=2e-3)
    assert found[way]["eval"].dtype is torch.bfloat16
    assert any(not torch.equal(found[way]["state"][name], value) for name, value in found["whole"]["state"].items())


@pytest.mark.parametrize("way", WAYS)
def test_train_step_says_that_it_gathers_nothing(way: str, found: dict[str, Any]) -> None:
    assert "FSDP2" in found[way]["refusal"]
    assert "model(...)" in found[way]["refusal"]
