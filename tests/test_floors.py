"""The floors in pyproject.toml are what `tox -e lowest` runs with."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def test_every_floor_is_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ("legacy", "lightning", "tensorboard", "yaml", "test")
    wanted = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    floors = {found.name: next(iter(found.specifier)).version for found in map(Requirement, wanted)}
    lines = [line for line in (ROOT / "lowest.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    run = {found.name: next(iter(found.specifier)).version for found in map(Requirement, lines)}
    assert run.keys() == floors.keys()
    assert {name: Version(text) for name, text in run.items()} == {name: Version(text) for name, text in floors.items()}
