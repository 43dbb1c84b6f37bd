"""Where ONNX Runtime training can be installed: the extras, the doctor's advice and tox say the same.

onnxruntime-training-cpu 1.19.2 has wheels for Python 3.8 to 3.12, onnxruntime-training 1.19.2 (CUDA) for 3.8 to 3.11.
"""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from torch_ort_ckpt.cli import doctor

ROOT = Path(__file__).parents[1]
LAST = {"onnxruntime-training-cpu": (3, 12), "onnxruntime-training": (3, 11)}


def requirement(name: str) -> Requirement:
    found = re.findall(rf'"({name}==[^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert len(found) == 1
    return Requirement(found[0])


@pytest.mark.parametrize("name", LAST)
@pytest.mark.parametrize("python", [(3, 10), (3, 11), (3, 12), (3, 13)])
def test_the_extras_ask_for_a_wheel_where_there_is_one(name: str, python: tuple[int, int]) -> None:
    marker = requirement(name).marker
    assert marker is not None
    assert marker.evaluate({"python_version": f"{python[0]}.{python[1]}"}) == (python <= LAST[name])


@pytest.mark.parametrize(("python", "installs"), [((3, 11), True), ((3, 12), True), ((3, 13), False)])
def test_the_doctor_advises_the_extra_where_it_brings_ort(python: tuple[int, int], installs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", (*python, 1, "final", 0))
    fix = doctor.ort_engine(None).fix
    assert fix is not None
    assert (fix == 'pip install "torch-ort-ckpt[ort]"') == installs
    if not installs:
        assert "python3.12 -m venv" in fix
        assert "ends at Python 3.12" in fix


@pytest.mark.parametrize(("python", "installs"), [((3, 11), True), ((3, 12), False)])
def test_the_doctor_advises_the_cuda_build_where_there_is_one(
    python: tuple[int, int], installs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", (*python, 1, "final", 0))
    assert (doctor.ort_cuda({}, device=True).fix is not None) == installs


@pytest.mark.parametrize(("name", "tested"), [("py311", True), ("py312", True), ("py313", False), ("noort", False)])
def test_tox_tests_with_ort_where_it_can_be_installed(name: str, tested: bool) -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    extras = tox[f"testenv:{name}"]["extras"]
    assert ("ort" in re.split(r"[,\s]+", extras)) == tested
