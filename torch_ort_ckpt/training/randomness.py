"""The state of every random number generator a training step may draw from, as plain data."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """torch (CPU and every CUDA device), numpy and Python's `random`."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the generators to the states from `random_states`."""
    # Cloned: a state that aliases a mapped file would keep the file alive.
    torch.set_rng_state(states["torch"].clone())
    np.random.set_state(states["numpy"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([state.clone() for state in states["cuda"]][: torch.cuda.device_count()])
