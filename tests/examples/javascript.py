"""Packages of the JavaScript registry for tests: installed once into a cache folder, and a server for pages that use them."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torch_ort_ckpt" / "npm"


@functools.cache
def installed(package: str) -> Path:
    """The folder `node_modules` that holds the package; the test is skipped where it can't be installed."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    folder = CACHE / package
    modules = folder / "node_modules"
    if not (modules / package / "package.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        # No scripts: that of onnxruntime-node downloads CUDA libraries, and the CPU ones are in the package.
        command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts", package]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250)
        if done.returncode:
            pytest.skip(
                f"npm can't install {package}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no reason given'}"
            )
    return modules


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def guess_type(self, path: str | os.PathLike[str]) -> str:
        own = {".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm"}
        return own.get(Path(path).suffix) or super().guess_type(path)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server for the folder, on this machine only."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
