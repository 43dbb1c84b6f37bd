"""What every test may ask for: a `truth` for each real checkpoint, and skips for what this machine lacks."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from .browser import find_chromium

settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")  # a test says what is right, not how fast this machine is


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {
        "ort": None if importlib.util.find_spec("onnxruntime") else "needs onnxruntime-training",
        "cuda": None if torch.cuda.is_available() else "needs a GPU",
        "lightning": None if importlib.util.find_spec("lightning") else "needs lightning",
        "browser": None if find_chromium() else "needs chromium",
        "soak": None if os.environ.get("TOC_SOAK") else "takes long or much memory: tox -e soak",
    }
    for item in items:
        for name, reason in missing.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
