"""Make an environment for each release of ONNX Runtime that trains, write artifacts for it, and train them there.

python -m tests.clients.run [--environments FOLDER] [release ...]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .write import CASES, write

CLIENTS = {
    "1.16": "onnxruntime-training==1.16.3",
    "1.17": "onnxruntime-training-cpu==1.17.3",
    "1.18": "onnxruntime-training-cpu==1.18.0",
    "1.19": "onnxruntime-training-cpu==1.19.2",
}
_WITH = ("numpy==1.26.4", "onnx==1.16.2", "protobuf==7.36.2")
"""What those wheels were built against; they can't use NumPy 2."""
_TOLERANCE = 1e-5
_DEFAULT = ("1.18", "1.19")
"""Releases that read what is written without `for_ort`."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.run", description="Train our artifacts in each release of ONNX Runtime.")
    parser.add_argument("releases", nargs="*", default=list(CLIENTS))
    parser.add_argument("--environments", type=Path, default=Path(".tox/clients/releases"), help="where the clients' environments are made")
    options = parser.parse_args(arguments)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for release in options.releases:
            python = environment(options.environments.absolute() / release, CLIENTS[release])
            for for_ort in [release, None] if release in _DEFAULT else [release]:
                for name, optimizer in CASES:
                    written = Path(folder) / f"{for_ort}-{name}-{optimizer}"
                    if not written.exists():
                        write(written, name, optimizer, for_ort)
                    place = written.with_name("trained")
                    shutil.copytree(written, place)
                    found = train(python, place)
                    shutil.rmtree(place)
                    fault = faults(found)
                    bad += bool(fault)
                    title = f"for_ort={for_ort} {name} {optimizer}"
                    good = f"ok, loss within {found.get('loss', 0):.1e}"
                    print(f"{found.get('release', release):8} {title:36} {fault or good}", flush=True)
    return 1 if bad else 0


def environment(place: Path, package: str) -> Path:
    """The interpreter of an environment with this release and without torch."""
    python = place / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not (place / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        # the constraints of the main environment are for its own release of ONNX Runtime and NumPy
        clean = {name: value for name, value in os.environ.items() if name not in ("PIP_CONSTRAINT", "PYTHONPATH")}
        subprocess.run([str(python), "-m", "pip", "install", "-q", package, *_WITH], check=True, env=clean)
        (place / "ready").touch()
    return python


def train(python: Path, folder: Path) -> dict[str, Any]:
    """What the client's script printed, or how it failed."""
    script = Path(__file__).with_name("train.py")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(python), "-I", str(script), str(folder)], capture_output=True, text=True, env=clean, cwd=folder, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"it died with code {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def faults(found: dict[str, Any]) -> str:
    """Empty, or what was wrong."""
    if "error" in found:
        return str(found["error"])[-300:]
    limits = {"loss": _TOLERANCE, "eval": _TOLERANCE, "inference": 1e-4, "copied back": 0.0}
    wrong = [f"{name} is off by {found[name]:.1e}" for name, limit in limits.items() if not found[name] <= limit]
    wrong += [f"{name} is wrong" for name, value in found.items() if value is False]
    return "; ".join(wrong)


if __name__ == "__main__":
    sys.exit(main())
