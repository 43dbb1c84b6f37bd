"""The C++ program trains as PyTorch does, with the library of whatever onnxruntime is installed.

The headers come with ONNX Runtime's release archives, not with its wheel: `TOC_ORT_INCLUDE` names their folder.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc

pytestmark = pytest.mark.clients

SOURCE = Path(__file__).parents[2] / "examples" / "cpp" / "train.cpp"
HEADER = "onnxruntime_cxx_api.h"
PLACES = ("/usr/include/onnxruntime", "/usr/local/include/onnxruntime", "/usr/local/include", "/opt/homebrew/include/onnxruntime")


def headers() -> Path:
    places = [Path(place) for place in (os.environ.get("TOC_ORT_INCLUDE"), *PLACES) if place]
    found = next((place for place in places if (place / HEADER).exists()), None)
    if found is None:
        pytest.skip(f"needs {HEADER}: TOC_ORT_INCLUDE names its folder")
    return found


def library() -> Path:
    package = importlib.util.find_spec("onnxruntime")
    places = [] if package is None or package.origin is None else sorted(Path(package.origin).parent.glob("capi/libonnxruntime.so*"))
    if not places:
        pytest.skip("needs an onnxruntime wheel with libonnxruntime.so (the stock one has it)")
    return places[-1]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder, shared = tmp_path_factory.mktemp("cpp"), library()
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", str(SOURCE), "-I", str(headers()), str(shared)]
    subprocess.run([*command, f"-Wl,-rpath,{shared.parent}", "-o", str(folder / "train")], check=True, timeout=280)
    # The library's own name is libonnxruntime.so.1: that is what the program looks for.
    (folder / "libonnxruntime.so.1").symlink_to(shared)
    return folder / "train"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_program_trains_as_pytorch_does(program: Path, accumulate: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    native = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
    artifacts = toc.export_artifacts(native, (x,), tmp_path / "artifacts")
    artifacts.state.properties['a "quoted" name'] = "é\n"
    toc.export_step_model(artifacts, tmp_path, accumulate=accumulate)
    names = [spec.name for spec in artifacts.inputs]
    save_file(dict(zip(names, (x, y), strict=True)), tmp_path / "batch.safetensors")
    command = [str(program), str(tmp_path), str(tmp_path / "batch.safetensors"), "6", "0.01", str(tmp_path / "trained.safetensors")]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(program.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
    optimizer = torch.optim.AdamW(native.parameters(), lr=0.01)
    expected = []
    for number in range(6):
        loss = F.cross_entropy(native(x), y)
        loss.backward()
        expected.append(loss.item())
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert [float(line) for line in done.stdout.split()] == pytest.approx(expected, abs=1e-5)
    state = toc.load(tmp_path / "trained.safetensors")
    (group,) = state.optimizer.values()
    assert (group.step, group.lr) == (6 // accumulate, 0.01)
    assert state.properties == artifacts.state.properties
    again = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    again.load_state_dict(toc.to_state_dict(state))
    assert int(again[1].num_batches_tracked) == 6
    torch.testing.assert_close(again[3].weight, native[3].weight, atol=1e-4, rtol=1e-3)
    fresh = tmp_path / "broken"
    fresh.mkdir()
    shutil.copy(tmp_path / "step_model.onnx", fresh)
    (fresh / "state.safetensors").write_bytes((tmp_path / "state.safetensors").read_bytes()[:100])
    failed = subprocess.run([command[0], str(fresh), *command[2:]], capture_output=True, text=True, timeout=250, env=environment)
    assert failed.returncode == 1
    assert "not a safetensors file" in failed.stderr
