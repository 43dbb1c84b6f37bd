"""Where `torch.compile` stops. A module of its own, because the decorator imports the whole compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
def outside(run: Callable[..., Any], *args: Any) -> Any:
    """Call it as it is: an engine's sessions can't be traced, and trying piece by piece would recompile at every step."""
    return run(*args)
