"""What happens to a run must not happen to its checkpoints: kills, full disks, missing rights. Real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

import torch_ort_ckpt as toc
from tests.training.setups import data, plain
from torch_ort_ckpt.training.feed import Feed

ROOT = Path(__file__).parents[2]
CAN_MOUNT = shutil.which("unshare") is not None and not subprocess.run(
    ["unshare", "-m" if os.name == "posix" and os.geteuid() == 0 else "-rm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"], check=False
).returncode  # fmt: skip
pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs signals and file modes")


def scenario(name: str, directory: Path, *more: object) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.training.faults", name, str(directory), *map(str, more)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280 if 2000 not in more else 4000, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kills", [200, pytest.param(2000, marks=pytest.mark.soak)])
def test_killed_at_random_moments_no_entry_is_lost_and_the_weights_are_those_of_a_quiet_run(kills: int, tmp_path: Path) -> None:
    """Half of the runs save in the background. Every entry found after a kill verifies, and the newest never gets older."""
    found = scenario("kill", tmp_path / "run", kills)
    assert found["lost"] == 0
    assert found["equal"]
    assert found["leftovers"] == []
    assert found["inside a save"] > kills // 10  # the kills did hit saves and rotations
    assert found["steps"] > kills // 20


@pytest.mark.skipif(not CAN_MOUNT, reason="may not mount a small file system")
def test_a_full_disk_is_said_and_leaves_earlier_entries_whole(tmp_path: Path) -> None:
    found = scenario("mounted", tmp_path)
    assert found["saved"] >= 2
    assert "No space left on device" in found["message"]
    assert found["whole"] == list(range(1, found["saved"] + 1))
    assert found["leftovers"] == []
    assert "training goes on" in found["warned"][0]
    assert found["goes on"]


def test_missing_rights_are_said_and_leave_earlier_entries_whole() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own can't be reached by another user
        os.chmod(folder, 0o777)
        found = scenario("denied", Path(folder) / "run")
        os.chmod(Path(folder) / "run", 0o777)
    assert "Permission denied" in found["message"]
    assert (found["whole"], found["files"]) == ([1], ["checkpoint_1"])
    assert "Permission denied" in found["warned"][0]
    assert "training goes on" in found["warned"][0]


@pytest.mark.parametrize("steps", [300, pytest.param(5000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("background", [False, True])
def test_a_long_run_keeps_memory_and_descriptors_flat(background: bool, steps: int, tmp_path: Path) -> None:
    """Saves at every other step."""
    process, setup = psutil.Process(), plain()
    feed = Feed(data())
    manager = toc.CheckpointManager(tmp_path, max_num_checkpoints=2, async_save=background, durable=False)
    memory, descriptors = [], []
    for step in range(1, steps + 1):
        setup.loss(next(feed)).backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        if step % 2 == 0:
            manager.save(step, setup.model, setup.optimizer, data=feed, metrics={"loss": 1.0})
        if step % (steps // 10) == 0:
            manager.wait()
            memory.append(process.memory_info().rss)
            descriptors.append(process.num_fds())
    manager.close()
    assert len(manager.list()) == 2
    assert max(descriptors[2:]) <= descriptors[1]
    assert memory[-1] - memory[2] < 8 << 20, [value >> 20 for value in memory]
