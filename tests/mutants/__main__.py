"""The sampler: copy the tree, record the coverage map, put in one fault after the other, run the tests that can see it, report.

Everything it writes is in one folder (`--folder`). Results are appended as they come: a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from .covering import CoverageMap
from .faults import Fault, faults_in, is_python

ROOT = Path(__file__).resolve().parents[2]
VERDICTS = ("noticed", "survived", "not covered")


def main() -> int:
    options = _options()
    folder: Path = options.folder.resolve()
    tree = folder / "tree"
    copy_tree(tree)
    say(f"{folder}: a copy of the tree, the coverage map and the results")
    faults = choose(tree, options.size, options.seed, options.only)
    if options.list:
        print(*faults, sep="\n")
        return 0
    results = Results(folder / "results.jsonl", again=options.again)
    with Worker(folder, tree) as worker:
        covered = CoverageMap(folder / "map", tree)
        files = sorted(path.relative_to(tree).as_posix() for path in (tree / "tests").rglob("test_*.py"))
        files = [file for file in files if not any(file.startswith(left_out) for left_out in options.without)]
        covered.record(files, worker.ask, say)
        covered.load(files)
        for test in covered.failed:
            say(f"fails without a fault, left out: {test}")
        for position, fault in enumerate(faults):
            if fault.identity in results:
                continue
            started = time.monotonic()
            verdict, by = try_fault(fault, tree, covered, worker, options.budget)
            results.add(fault, verdict, by)
            say(f"{position + 1}/{len(faults)} {verdict} ({time.monotonic() - started:.0f} s) {fault}" + (f"  [{by}]" if by else ""))
    report(faults, results, options)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--size", type=int, default=150, help="faults in all, shared among the packages by their size (at least 8 each)")
    parser.add_argument("--seed", default="0", help="a larger size with the same seed adds to the smaller sample")
    parser.add_argument("--only", default="", help="only files whose path contains this text")
    parser.add_argument("--budget", type=float, default=20, help="seconds of tests for one fault")
    parser.add_argument("--without", action="append", default=[], metavar="PREFIX", help="leave out test files below this path")
    parser.add_argument("--again", action="store_true", help="try again what survived or was not covered")
    parser.add_argument("--list", action="store_true", help="print the sample and stop")
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutants", help="where the copy, the map and the results are kept")
    return parser.parse_args()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def copy_tree(tree: Path) -> None:
    """The tracked and new files of the repository; what has not changed keeps its time, and so its compiled form."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for path in [path for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts]:
        if path.relative_to(tree).as_posix() not in wanted:
            path.unlink()
    for name in wanted:
        source, target = ROOT / name, tree / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            shutil.copymode(source, target)


def choose(tree: Path, size: int, seed: str, only: str) -> list[Fault]:
    by_package: dict[str, list[Fault]] = {}
    for path in sorted((tree / "torch_ort_ckpt").rglob("*.py")):
        name = path.relative_to(tree).as_posix()
        if only in name:
            for fault in faults_in(path.read_bytes(), name):
                by_package.setdefault(fault.package, []).append(fault)
    total = sum(map(len, by_package.values()))
    chosen: list[Fault] = []
    for package, faults in sorted(by_package.items()):
        random.Random(f"{seed}/{package}").shuffle(faults)
        possible = (fault for fault in faults if is_python(fault.apply((tree / fault.file).read_bytes())))
        chosen += islice(possible, max(8, round(size * len(faults) / total)))
    return chosen


def try_fault(fault: Fault, tree: Path, covered: CoverageMap, worker: Worker, budget: float) -> tuple[str, str]:
    tests = covered.tests_for(fault, budget)
    if not tests:
        return "not covered", ""
    path = tree / fault.file
    source = path.read_bytes()
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)  # compiled code is told from its source by whole seconds
    path.write_bytes(fault.apply(source))
    try:
        longest = max(covered.seconds[test] for test in tests)
        result = worker.ask(
            do="test",
            tests=tests,
            options=["--hypothesis-seed=0", "--timeout", str(60 + 5 * longest)],
            timeout=120 + 3 * sum(covered.seconds[test] for test in tests),
        )
    finally:
        path.write_bytes(source)
    if result["late"]:
        return "noticed", "timeout"
    if result["code"] in (0, 5):  # passed; nothing left to collect
        return "survived", f"{len(tests)} tests"
    return "noticed", result["failed"] or f"pytest ended with {result['code']}"


class Worker:
    """`worker.py` of the copied tree, in a process of its own."""

    def __init__(self, folder: Path, tree: Path) -> None:
        self.folder, self.tree = folder, tree

    def __enter__(self) -> Worker:
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self.folder / "hypothesis"),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.worker", str(self.folder)],
            cwd=self.tree,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def ask(self, **job: Any) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({**job, "log": str(self.folder / "last.log")}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("the worker ended; its messages stand above")
        return json.loads(answer)

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()


class Results:
    def __init__(self, path: Path, again: bool) -> None:
        self.path = path
        self.verdicts: dict[str, tuple[str, str]] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):  # a last line cut short by a kill
                kept = json.loads(line)
                self.verdicts[kept["identity"]] = kept["verdict"], kept["by"]
        if again:
            self.verdicts = {name: kept for name, kept in self.verdicts.items() if kept[0] == "noticed"}

    def __contains__(self, identity: str) -> bool:
        return identity in self.verdicts

    def add(self, fault: Fault, verdict: str, by: str) -> None:
        self.verdicts[fault.identity] = verdict, by
        with self.path.open("a") as file:
            file.write(json.dumps({"identity": fault.identity, "verdict": verdict, "by": by, "fault": str(fault)}) + "\n")


def report(faults: list[Fault], results: Results, options: argparse.Namespace) -> None:
    counts: dict[str, Counter[str]] = {}
    for fault in faults:
        counts.setdefault(fault.package, Counter())[results.verdicts[fault.identity][0]] += 1
    counts["all"] = sum(counts.values(), Counter())
    print(f"seed {options.seed}, {len(faults)} faults, at most {options.budget:.0f} s of tests for each\n")
    print(f"| package | faults | {' | '.join(VERDICTS)} | score |\n|---|---|---|---|---|---|")
    for package, count in counts.items():
        verdicts = " | ".join(str(count[name]) for name in VERDICTS)
        print(f"| {package} | {count.total()} | {verdicts} | {count['noticed'] / count.total():.0%} |")
    for verdict in VERDICTS[1:]:
        print(f"\n{verdict}:")
        print(*(f"  {fault}" for fault in faults if results.verdicts[fault.identity][0] == verdict), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
