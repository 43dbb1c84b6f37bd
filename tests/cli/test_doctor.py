"""`torch-ort-ckpt doctor` describes this environment correctly, and recognizes damaged ones."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.truth import Truth
from torch_ort_ckpt.cli import doctor, main
from torch_ort_ckpt.errors import MissingDependencyError
from torch_ort_ckpt.formats import FORMATS
from torch_ort_ckpt.storage.system import is_windows


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "torch_ort_ckpt", "doctor", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout)


def find(report: dict[str, Any], area: str, name: str) -> dict[str, Any]:
    (check,) = (check for check in report["checks"] if (check["area"], check["name"]) == (area, name))
    return check


def test_versions_are_the_installed_ones(report: dict[str, Any]) -> None:
    for name in ("numpy", "onnx", "torch"):
        assert find(report, "packages", name)["detail"] == importlib.metadata.version(name)
    assert report["version"] == toc.__version__


def test_every_format_was_tried(report: dict[str, Any]) -> None:
    assert {check["name"] for check in report["checks"] if check["area"] == "formats"} == set(FORMATS)
    for name in ("ort", "safetensors", "torch", "pbseq", "runner", "onnx"):
        assert find(report, "formats", name)["detail"] == "reads and writes"
    writes_hdf5 = importlib.util.find_spec("h5py") is not None
    assert find(report, "formats", "ortcp")["status"] == (doctor.WORKS if writes_hdf5 else doctor.ABSENT)


def test_engines_follow_what_is_installed(report: dict[str, Any]) -> None:
    assert find(report, "engines", "torch")["status"] == doctor.WORKS
    ort = find(report, "engines", "ort")
    if importlib.util.find_spec("onnxruntime"):
        assert ort["status"] == doctor.WORKS
        assert "CPUExecutionProvider" in ort["detail"]
    else:
        assert ort["status"] == doctor.ABSENT
        assert "torch-ort-ckpt[ort]" in ort["fix"]


def test_cuda_is_not_claimed_without_a_gpu(report: dict[str, Any]) -> None:
    expected = doctor.WORKS if torch.cuda.is_available() else doctor.ABSENT
    assert find(report, "cuda", "torch")["status"] == expected


def damaged_site(folder: Path, *distributions: str, code: str) -> dict[str, str]:
    """An environment in which these distributions provide `onnxruntime`, whose source is `code`."""
    package = folder / "onnxruntime"
    package.mkdir()
    (package / "__init__.py").write_text(code)
    for name in distributions:
        info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text("onnxruntime/__init__.py,,\n")
    search = os.pathsep.join([str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": search, "NO_COLOR": "1"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_ort_ckpt", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_two_distributions_of_one_package_are_a_conflict(tmp_path: Path) -> None:
    code = "raise ImportError('DLL load failed while importing onnxruntime_pybind11_state')"
    done = run(damaged_site(tmp_path, "onnxruntime", "onnxruntime-gpu", code=code), "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["ok"] is False
    package = find(report, "packages", "onnxruntime")
    assert package["status"] == doctor.PROBLEM
    assert "onnxruntime-gpu 1.0" in package["detail"]
    assert package["fix"].startswith("pip uninstall -y onnxruntime onnxruntime-gpu")
    engine = find(report, "engines", "ort")
    assert engine["status"] == doctor.PROBLEM
    assert "DLL load failed" in engine["detail"]
    assert find(report, "engines", "torch")["status"] == doctor.WORKS


def test_a_package_that_kills_the_process_is_survived(tmp_path: Path) -> None:
    done = run(damaged_site(tmp_path, "onnxruntime", code="import os; os.abort()"))
    assert done.returncode == 1
    assert "the process died with code" in done.stdout
    assert "To fix" in done.stdout
    assert "pip install --force-reinstall" in done.stdout


@pytest.mark.parametrize(
    ("facts", "status", "part"),
    [
        (None, doctor.ABSENT, "not installed"),
        ({"error": "ImportError: no"}, doctor.PROBLEM, "ImportError: no"),
        ({"result": [0.0, 0.0], "version": "1"}, doctor.PROBLEM, "1 + 1 gives"),
        ({"result": [2.0, 2.0], "version": "1.19.2", "error": "No module named 'onnxruntime.training'"}, doctor.PROBLEM, "can't train"),
        ({"result": [2.0, 2.0], "version": "1.10.0", "trains": False, "providers": ["CPU"]}, doctor.PROBLEM, "too old"),
        ({"result": [2.0, 2.0], "version": "1.31.1", "trains": False, "providers": ["CPU"]}, doctor.WORKS, "a stock build"),
        ({"result": [2.0, 2.0], "version": "1.19.2", "trains": True, "providers": ["CPU"]}, doctor.WORKS, "1.19.2"),
    ],
)
def test_what_the_trial_says_about_the_engine(facts: dict[str, Any] | None, status: str, part: str) -> None:
    check = doctor.ort_engine(facts)
    assert check.status == status
    assert part in check.detail
    assert (check.fix is None) == (status == doctor.WORKS)


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        (None, "torch: ONNX Runtime is not installed"),
        ({"trains": True}, "ort: a training build"),
        ({"trains": False}, "ort for artifacts of"),
    ],
)
def test_what_auto_takes_is_said(facts: dict[str, Any] | None, part: str) -> None:
    if facts is not None:
        facts |= {"result": [2.0, 2.0], "version": "1.31.1", "providers": ["CPU"]}
    check = doctor.auto_engine(facts, doctor.ort_engine(facts))
    assert check.status == doctor.WORKS
    assert check.detail.startswith(part)


@pytest.mark.parametrize(
    ("facts", "device", "status"),
    [
        ({}, False, doctor.ABSENT),
        ({"cuda": None}, True, doctor.WORKS),
        ({"cuda": "libcublasLt.so.11: cannot open shared object file"}, True, doctor.PROBLEM),
        ({"cuda": "libcublasLt.so.11: cannot open shared object file"}, False, doctor.ABSENT),
    ],
)
def test_what_the_trial_says_about_cuda(facts: dict[str, Any], device: bool, status: str) -> None:
    check = doctor.ort_cuda(facts, device)
    assert check.status == status
    if facts.get("cuda"):
        assert "libcublasLt.so.11" in check.detail
        assert str(check.fix).endswith("folders to PATH" if is_windows() else "folders to LD_LIBRARY_PATH")


def test_the_files_of_the_cuda_provider_have_the_systems_names() -> None:
    names = doctor.provider_libraries()
    if is_windows():
        assert names == ["onnxruntime_providers_shared.dll", "onnxruntime_providers_cuda.dll"]
    else:
        assert names == ["libonnxruntime_providers_shared.so", "libonnxruntime_providers_cuda.so"]


def test_commands_are_quoted_for_every_shell(report: dict[str, Any]) -> None:
    """cmd.exe passes single quotes on, and only double ones keep zsh from reading the brackets."""
    fixes = [check["fix"] or "" for check in report["checks"]] + [str(doctor.ort_engine(None).fix)]
    assert any("[" in fix for fix in fixes)
    assert not [fix for fix in fixes if "'" in fix]
    assert not [fix for fix in fixes if "[" in fix and '"torch-ort-ckpt[' not in fix]


def test_the_terminal_shows_a_table_and_the_missing_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "safetensors" in out
    assert "reads and writes" in out
    if importlib.util.find_spec("lightning") is None:
        assert 'pip install "torch-ort-ckpt[lightning]"' in out


def test_errors_of_a_missing_engine_point_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as if it were not installed
    with pytest.raises(MissingDependencyError, match="torch-ort-ckpt doctor"):
        toc.OrtModule(Truth("fbv2_ort1_19_2_adamw_full").folder, engine="ort")
