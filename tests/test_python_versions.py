"""Where ONNX Runtime training can be installed: the extras, the doctor's advice and tox say the same.

onnxruntime-training-cpu 1.19.2 has wheels for Python 3.8 to 3.12, onnxruntime-training 1.19.2 (CUDA) for 3.8 to 3.11.
"""

from __future__ import annotations

import configparser
import re
import tomllib
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


@pytest.mark.parametrize(
    ("python", "system", "machine", "training"),
    [
        ("3.12", "linux", "x86_64", True),
        ("3.12", "win32", "AMD64", True),
        ("3.12", "darwin", "arm64", True),
        ("3.12", "linux", "aarch64", False),
        ("3.13", "linux", "x86_64", False),
        ("3.13", "darwin", "arm64", False),
    ],
)
def test_the_extra_brings_one_build_everywhere(python: str, system: str, machine: str, training: bool) -> None:
    """The training build where it has a wheel, the stock one elsewhere, never both."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    place = {"python_version": python, "sys_platform": system, "platform_machine": machine}
    found = [Requirement(line).name for line in extras["ort"] if Requirement(line).marker.evaluate(place)]
    assert found == ["onnxruntime-training-cpu" if training else "onnxruntime"]


def test_the_doctor_advises_the_extra() -> None:
    assert doctor.ort_engine(None).fix == 'pip install "torch-ort-ckpt[ort]"'


@pytest.mark.parametrize(("python", "extra"), [((3, 11), "cuda"), ((3, 12), "cuda12")])
def test_the_doctor_advises_the_cuda_build_that_there_is(python: tuple[int, int], extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", (*python, 1, "final", 0))
    assert str(doctor.ort_cuda({}, device=True).fix).endswith(f'pip install "torch-ort-ckpt[{extra}]"')


@pytest.mark.parametrize(("name", "tested"), [("py311", True), ("py312", True), ("py313", False), ("noort", False)])
def test_tox_tests_with_ort_where_it_can_be_installed(name: str, tested: bool) -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    extras = tox[f"testenv:{name}"]["extras"]
    assert ("ort" in re.split(r"[,\s]+", extras)) == tested
