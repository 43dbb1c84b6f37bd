"""`pytest -p tests.platforms.windows`: Windows' rules for the whole run."""

from .rules import enforce

enforce("windows")
