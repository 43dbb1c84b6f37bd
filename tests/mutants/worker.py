"""The process in the copy of the tree that runs tests: it imports the large packages once and forks for each job.

A job is a line of JSON on stdin, its result a line on stdout. The file it runs from is the copy's, and so are the package and the tests.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

PRELOADED = (
    "numpy",
    "torch",
    "onnx",
    "onnxruntime",
    "h5py",
    "hypothesis",
    "pytest",
    "safetensors.torch",
    "coverage",
    "torch.distributed.checkpoint",
)
MEMORY, FILE_SIZE = 16 << 30, 8 << 30  # a fault in a limit must not take the machine down


class Chosen:
    """Runs the tests with these ids only, in this order, and remembers the first that fails."""

    def __init__(self, ids: list[str]) -> None:
        self.order = {name: position for position, name in enumerate(ids)}
        self.failed: str | None = None

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid


class Recorder:
    """Gives each test a coverage context of its own, also in the processes it starts, and notes outcomes and durations."""

    def __init__(self, measured: Any) -> None:
        self.measured = measured
        self.seconds: dict[str, float] = {}
        self.outcome: dict[str, str] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.measured.switch_context(nodeid)
        os.environ["MUTANTS_CONTEXT"] = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.outcome != "passed":
            self.outcome[report.nodeid] = report.outcome
        self.outcome.setdefault(report.nodeid, "passed")


def run_tests(job: dict[str, Any]) -> dict[str, Any]:
    import pytest

    chosen = Chosen(job["tests"])
    files = list(dict.fromkeys(name.split("::")[0] for name in job["tests"]))
    code = pytest.main([*files, "-x", *job["options"]], plugins=[chosen])
    return {"code": int(code), "failed": chosen.failed}


def record(job: dict[str, Any]) -> dict[str, Any]:
    import coverage
    import pytest

    folder = Path(job["folder"])
    os.environ["MUTANTS_COVERAGE"] = str(folder / "data")
    os.environ["MUTANTS_MEASURED"] = job["measured"]
    os.environ["PYTHONPATH"] = os.pathsep.join([job["startup"], os.environ["PYTHONPATH"]])
    measured = coverage.Coverage(
        data_file=str(folder / "data"), data_suffix=True, include=[job["measured"]], config_file=False, messages=False
    )
    measured.start()
    recorder = Recorder(measured)
    pytest.main([job["file"], *job["options"]], plugins=[recorder])
    measured.stop()
    measured.save()
    return {"seconds": recorder.seconds, "outcome": recorder.outcome}


def _in_child(job: dict[str, Any], answer: Path) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdin = open(os.devnull)  # noqa: SIM115  # lives as long as the process
    result = record(job) if job["do"] == "record" else run_tests(job)
    answer.write_text(json.dumps(result))


def serve(folder: Path) -> None:
    answer = folder / "answer.json"
    for line in sys.stdin:
        job = json.loads(line)
        answer.unlink(missing_ok=True)
        temporary = folder / "tmp"
        job["options"] += ["-q", "-p", "no:cacheprovider", "--basetemp", str(temporary), "-p", "no:randomly"]
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            try:
                _in_child(job, answer)
            finally:
                sys.stdout.flush()
                os._exit(0)
        late = False
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() - started > job["timeout"]:
                late = True
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # what the tests left behind
        shutil.rmtree(temporary, ignore_errors=True)
        result = json.loads(answer.read_text()) if answer.exists() else {"code": -1, "failed": None}
        print(json.dumps({**result, "late": late, "took": time.monotonic() - started}), flush=True)


if __name__ == "__main__":
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    serve(Path(sys.argv[1]))
