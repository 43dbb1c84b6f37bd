"""What every test may ask for: a `truth` for each real checkpoint, and skips for what this machine lacks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from torch_ort_ckpt.storage.system import is_windows

from .browser import find_chromium

# A test says what is right, not how fast this machine is. CI runs the same examples each time; at a desk they vary.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI")))
settings.load_profile("any speed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {
        "ort": None if importlib.util.find_spec("onnxruntime") else "needs onnxruntime-training",
        "posix": "needs what Windows does not have" if is_windows() else None,
        "cuda": None if torch.cuda.is_available() else "needs a GPU",
        "lightning": None if importlib.util.find_spec("lightning") else "needs lightning",
        "browser": None if find_chromium() else "needs chromium",
        "zoo": None if os.environ.get("TOC_ZOO") else "takes long: TOC_ZOO=1",
        "soak": None if os.environ.get("TOC_SOAK") else "takes long or much memory: tox -e soak",
    }
    for item in items:
        for name, reason in missing.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def _restored_registry() -> Iterator[None]:
    """Operators registered in the test are gone afterwards."""
    from torch_ort_ckpt.graphs.translation import registry

    before = {key: list(value) for key, value in registry._OPS.items()}
    yield
    registry._OPS.clear()
    registry._OPS.update(before)
