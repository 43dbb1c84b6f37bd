"""`torch_ort_ckpt.lightning`: the Lightning plugin and callback, which live in `integrations/lightning.py`."""

from __future__ import annotations

from typing import Any

from .integrations import lightning as _lightning


def __getattr__(name: str) -> Any:
    return getattr(_lightning, name)


def __dir__() -> list[str]:
    return dir(_lightning)
