"""`pytest -p tests.platforms.macos`: macOS' rules for the whole run."""

from .rules import enforce

enforce("macos")
