"""The rules hold in the Python processes that tests start, too: Python imports this file when it starts."""

import importlib.util
import os
from pathlib import Path

if os.environ.get("TOC_PLATFORM"):
    # by path: importing the package `tests.platforms` imports torch
    spec = importlib.util.spec_from_file_location("platform_rules", Path(__file__).parents[1] / "rules.py")
    assert spec is not None
    assert spec.loader is not None
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    rules.enforce(os.environ["TOC_PLATFORM"])
