"""What a release needs: one version, the files in the package, and a workflow that does what `.ci/run` does."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
from pathlib import Path

import torch_ort_ckpt as toc
from torch_ort_ckpt.report import render

ROOT = Path(__file__).parents[1]


def test_the_version_has_one_place() -> None:
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == toc.__version__
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert all(re.fullmatch(r"[0-9.]+ \(\d{4}-\d\d-\d\d\)", heading) for heading in headings[1:])  # every release has its date
    assert [heading.split()[0] for heading in headings[1:]].count(toc.__version__) == 1


def test_an_installed_package_is_this_version() -> None:
    installed = {name for names in importlib.metadata.packages_distributions().values() for name in names}
    if "torch-ort-ckpt" in installed:
        assert importlib.metadata.version("torch-ort-ckpt") == toc.__version__


def test_pytorch_is_one_whose_weights_only_holds() -> None:
    """Before 2.6 `torch.load(weights_only=True)` can be made to run code (CVE-2025-32434); 2.13 is the oldest that was run."""
    assert re.search(r'^    "torch>=(.*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1] == "2.13"


def test_the_package_has_its_data() -> None:
    assert (Path(toc.__file__).parent / "py.typed").is_file()
    assert render({"title": "t"}).startswith("<!doctype html>")


def test_the_workflow_runs_the_same_script() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    commands = re.findall(r"^ +- run: (.*)$", workflow, re.MULTILINE)
    assert commands[0] == ".ci/run"
    matrix = re.search(r"environment: \[(.*)\]", workflow)
    assert matrix is not None
    for command in commands[1:]:
        if command != "python -m pip install tox":
            names = command.removeprefix("python -m tox -e ").replace("${{ matrix.environment }}", matrix[1])
            assert {f"testenv:{name.strip()}" for name in names.split(",")} <= {*tox}
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_hooks_are_what_tox_runs() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    tox = (ROOT / "tox.ini").read_text()
    for command in re.findall(r"^ +entry: (.*)$", hooks, re.MULTILINE):
        assert command.removesuffix(" --fix") in tox


def test_the_readme_reads_whole_on_a_package_index() -> None:
    """Where relative links lead nowhere."""
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", (ROOT / "README.md").read_text(encoding="utf-8")) == []
