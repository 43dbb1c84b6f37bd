"""What tests can't do on Windows, or under its stand-in."""

from __future__ import annotations

import os

import pytest

from torch_ort_ckpt.storage.system import is_windows

WINDOWS = is_windows()
"""Whether this is Windows, or its stand-in."""

not_on_windows = pytest.mark.skipif(WINDOWS, reason="Windows has no such files, modes or signals")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
