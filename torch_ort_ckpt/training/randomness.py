"""The state of every random number generator a training step may draw from, as plain data."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..cuda import devices


def random_states(device: torch.device | None = None) -> dict[str, Any]:
    """torch (CPU and every CUDA device), numpy and Python's `random`. `device` is the GPU of the model, where it has one."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    if found := devices.random_states():
        states["cuda"] = found
        if device is not None:
            states["cuda_device"] = device.index
    return states


def set_random_states(states: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Restore the generators to the states from `random_states`; `device` is the GPU that the model is on now."""
    # Cloned: a state that aliases a mapped file would keep the file alive.
    torch.set_rng_state(states["torch"].clone())
    np.random.set_state(states["numpy"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    saved_on = states.get("cuda_device")
    moved = (saved_on, device.index) if saved_on is not None and device is not None else None
    devices.set_random_states(states.get("cuda", []), moved)
