"""Reading checkpoints of files takes the memory of a few tensors, however large the files are: their pages are given back.

Measured in a process of its own: the most memory it held, from just before the call (Linux resets its count on demand).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc

pytestmark = [
    pytest.mark.posix,  # on Windows files are read, not mapped: there are no pages to give back
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measured through Linux's /proc"),
]

TENSORS, TENSOR = 128, 1 << 20  # 128 MiB a file
CODE = """
import sys, torch_ort_ckpt as toc
from pathlib import Path
from torch_ort_ckpt import report

def kept(key):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(key + ":")]
    return int(line.split()[1]) << 10

folder, warm, action = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
actions = {
    "diff": lambda at: toc.diff(at / "a", at / "b"),
    "verify": lambda at: toc.verify(at / "a"),
    "summarize": lambda at: toc.summarize(at / "a", statistics=True),
    "average": lambda at: toc.average([at / "a", at / "b", at / "c"]),
    "convert": lambda at: toc.convert(at / "a", at / "converted.safetensors", overwrite=True, durable=False),
    "inspection": lambda at: report.inspection(at / "a"),
    "comparison": lambda at: report.comparison(at / "a", at / "b"),
}
actions[action](warm)  # imports, and memory that is allocated once
open("/proc/self/clear_refs", "w").write("5")
before = kept("VmRSS")
result = actions[action](folder)
print(kept("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    large, small = tmp_path_factory.mktemp("large"), tmp_path_factory.mktemp("small")
    for number, name in enumerate("abc"):
        weights = {f"w{index}": torch.full((TENSOR // 4,), float(index + number)) for index in range(TENSORS)}
        toc.save(toc.CheckpointState(weights), large / name, durable=False)
        toc.save(toc.CheckpointState({"w": torch.full((5,), float(number))}), small / name, durable=False)
    return large, small


def taken(action: str, files: tuple[Path, Path]) -> int:
    done = subprocess.run([sys.executable, "-c", CODE, *map(str, files), action], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize(
    ("action", "tensors"),
    [("diff", 64), ("verify", 64), ("summarize", 64), ("inspection", 64), ("comparison", 64), ("average", 2 * TENSORS), ("convert", 96)],
)
def test_the_pages_of_files_are_given_back(action: str, tensors: int, files: tuple[Path, Path]) -> None:
    """`average` holds its result besides; `convert` gives back every 64 MiB. Without that, each would hold 128 MiB or more of each file."""
    assert taken(action, files) < tensors * TENSOR
