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


def _found(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def trains() -> bool:
    """Whether a training build of onnxruntime is installed."""
    if not _found("onnxruntime"):
        return False
    from torch_ort_ckpt.engines.ort.build import installed

    return installed().trains


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {
        "ort": None if trains() else "needs onnxruntime-training",
        "ort_any": None if importlib.util.find_spec("onnxruntime") else "needs onnxruntime",
        "posix": "needs what Windows does not have" if is_windows() else None,
        "cuda": None if torch.cuda.is_available() else "needs a GPU",
        "lightning": None if importlib.util.find_spec("lightning") else "needs lightning",
        "huggingface": None if _found("transformers") and _found("accelerate") else "needs transformers and accelerate",
        "executorch": None if _found("executorch") else "needs executorch (tox -e executorch)",
        "browser": None if find_chromium() else "needs chromium",
        "clients": None if os.environ.get("TOC_CLIENTS") else "takes long, installs packages: tox -e browser",
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
