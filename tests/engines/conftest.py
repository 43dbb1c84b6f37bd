"""Exported artifacts, made once per run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from tests.engines.zoo import FAMILIES, export


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, nn.Module]]:
    """By family name: the folder with `model.onnx` and the artifacts, and the module they were made from."""
    made: dict[str, tuple[Path, nn.Module]] = {}

    def get(name: str) -> tuple[Path, nn.Module]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, export(FAMILIES[name], folder)
        return made[name]

    return get
