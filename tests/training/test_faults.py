"""Checkpoints survive kills, full disks and missing rights. Tested with real processes."""

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
SOAK = pytest.mark.soak
LOCKS = ("flock", "refused", "none")
CAN_MOUNT = shutil.which("unshare") is not None and not subprocess.run(
    ["unshare", "-m" if os.name == "posix" and os.geteuid() == 0 else "-rm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"], check=False
).returncode  # fmt: skip
pytestmark = pytest.mark.posix


def scenario(name: str, directory: Path, *more: object) -> dict[str, Any]:
    """What the scenario printed; one that hangs ends with pytest's timeout."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.training.faults", name, str(directory), *map(str, more)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("kills", "locks"),
    [
        (60, "flock"),
        (30, "refused"),
        *(pytest.param(kills, locks, marks=SOAK) for kills, locks in ((2000, "flock"), (500, "refused"), (500, "none"))),
    ],
)
def test_killed_at_random_operations_no_entry_is_lost_and_the_weights_are_those_of_a_quiet_run(
    kills: int, locks: str, tmp_path: Path
) -> None:
    """Half of the runs save in the background. Every entry found after a kill verifies, and what was once said to be saved is there."""
    found = scenario("kill", tmp_path / "run", kills, locks)
    assert found["lost"] == 0
    assert found["equal"]
    assert found["inside a save"] > kills // 10  # the kills did hit saves and rotations
    assert found["steps"] > kills // 2
    if locks == "flock":
        assert found["leftovers"] == []
    else:  # it is not known whether the writers are alive
        assert set(found["leftovers"]) <= {"incomplete .tmp", "complete .tmp"}


@pytest.mark.parametrize(
    ("stride", "locks"), [(5, "flock"), (3, "refused"), (5, "none"), *(pytest.param(1, locks, marks=SOAK) for locks in LOCKS)]
)
def test_killed_at_any_operation_an_entry_is_the_old_one_or_the_new_one(stride: int, locks: str, tmp_path: Path) -> None:
    """Also between the two renames of a replacement, with and without locks; a start that clears up may be killed too."""
    found = scenario("matrix", tmp_path, stride, locks)
    old, new, both = {"1": 1.0, "2": 1.0}, {"1": 1.0, "2": 2.0}, {"1": 1.0, "2": 1.0, "3": 2.0}
    for kind, order in {
        "replace": [old, new],
        "rotate": [old, both, {"2": 1.0, "3": 2.0}],
        "first": [{}, {"1": 2.0}],
        "start between renames": [new],
        "start beside a replaced one": [new],
        "lightning": [{"last": 1.0}, {"last": 2.0}],
    }.items():
        seen = [order.index(outcome["values"]) for outcome in found[kind]]
        assert seen == sorted(seen), kind
        assert (seen[0], seen[-1]) == (0, len(order) - 1), kind
        left = {name for outcome in found[kind] for name in outcome["leftovers"]}
        # Without locks it is not known whether a writer is alive: complete entries get their name if it is free, the rest stays.
        allowed = {"incomplete .tmp", "incomplete .lock", *(["complete .tmp"] if kind in ("replace", "lightning") else [])}
        assert left <= (set() if locks == "flock" else allowed), kind
        assert found[kind][-1]["leftovers"] == [], kind


@pytest.mark.skipif(not CAN_MOUNT, reason="may not mount a small file system")
def test_a_full_disk_is_said_and_leaves_earlier_entries_whole(tmp_path: Path) -> None:
    found = scenario("mounted", tmp_path)
    assert found["saved"] >= 2
    assert "No space left on device" in found["message"]
    assert found["whole"] == list(range(1, found["saved"] + 1))
    assert found["leftovers"] == []
    assert "training continues" in found["warned"][0]
    assert found["goes on"]


def test_missing_rights_are_said_and_leave_earlier_entries_whole() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own can't be reached by another user
        os.chmod(folder, 0o777)
        found = scenario("denied", Path(folder) / "run")
        os.chmod(Path(folder) / "run", 0o777)
    assert "Permission denied" in found["message"]
    assert (found["whole"], found["files"]) == ([1], ["checkpoint_1"])
    assert "Permission denied" in found["warned"][0]
    assert "training continues" in found["warned"][0]


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
