"""A pickled object that shows whether somebody unpickled it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Trap:
    """Unpickling this makes a folder at `path`."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)
