"""Which tests run a line of the package, recorded once for each test file, and which of them to run for a fault."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from .faults import Fault

RECORDING = 3600  # seconds for one test file, under coverage


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


class CoverageMap:
    def __init__(self, folder: Path, tree: Path) -> None:
        self.folder, self.tree = folder, tree
        self.seconds: dict[str, float] = {}  # of every test that passed
        self.failed: list[str] = []
        self.lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))  # file -> line -> tests
        self.imported: dict[str, set[int]] = defaultdict(set)  # lines that ran while a test file was collected
        self.sources: dict[str, set[str]] = defaultdict(set)  # file -> its digests when it was recorded
        folder.mkdir(parents=True, exist_ok=True)

    def record(self, files: list[str], ask: Callable[..., dict[str, Any]], say: Callable[[str], None]) -> None:
        """Records each of `files` that is new or changed since its last recording."""
        for position, file in enumerate(files):
            kept = self.folder / (file.replace("/", "+") + ".json")
            now = digest(self.tree / file)
            if kept.exists() and json.loads(kept.read_text())["digest"] == now:
                continue
            say(f"recording {position + 1}/{len(files)} {file}")
            data = self.folder / "data"
            shutil.rmtree(data, ignore_errors=True)
            data.mkdir()
            result = ask(
                do="record",
                file=file,
                folder=str(data),
                startup=str(self.tree / "tests/mutants/startup"),
                measured=str(self.tree / "torch_ort_ckpt/*"),
                options=["--timeout", "600"],
                timeout=RECORDING,
            )
            written = {"digest": now, "seconds": result.get("seconds", {}), "outcome": result.get("outcome", {}), **self._measured(data)}
            temporary = kept.with_suffix(".tmp")
            temporary.write_text(json.dumps(written))
            temporary.replace(kept)

    def _measured(self, data: Path) -> dict[str, Any]:
        from coverage import CoverageData
        from coverage.exceptions import DataError

        lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for part in data.iterdir():
            try:
                measured = CoverageData(str(part))
                measured.read()
            except DataError:
                continue  # of a process that was killed while it wrote
            for path in measured.measured_files():
                name = Path(path).relative_to(self.tree).as_posix()
                for line, contexts in measured.contexts_by_lineno(path).items():
                    lines[name][line].update(contexts)
        return {
            "lines": {name: {line: sorted(tests) for line, tests in by_line.items()} for name, by_line in lines.items()},
            "sources": {name: digest(self.tree / name) for name in lines},
        }

    def load(self, files: list[str]) -> None:
        for file in files:
            kept = json.loads((self.folder / (file.replace("/", "+") + ".json")).read_text())
            passed = {name for name, outcome in kept["outcome"].items() if outcome == "passed"}
            self.failed += [name for name, outcome in kept["outcome"].items() if outcome == "failed"]
            self.seconds.update({name: kept["seconds"][name] for name in passed})
            for name, by_line in kept["lines"].items():
                self.sources[name].add(kept["sources"][name])
                for line, tests in by_line.items():
                    self.lines[name][int(line)] |= passed.intersection(tests)
                    if "" in tests:
                        self.imported[name].add(int(line))

    def tests_for(self, fault: Fault, budget: float) -> list[str]:
        """The tests that run the fault's line: those that mirror the module first, then some of every other file, in `budget` seconds."""
        by_line = self.lines[fault.file]
        tests = by_line.get(fault.line) or by_line.get(fault.statement, set())
        stale = self.sources[fault.file] != {digest(self.tree / fault.file)}
        if not tests and (stale or self.imported[fault.file] & {fault.line, fault.statement}):
            tests = set().union(*by_line.values())  # runs at import: whoever uses the module may see it
        near: list[list[str]] = [[], []]
        others: dict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda name: (self.seconds[name], name)):
            distance = _distance(fault.file, test.split("::")[0])
            (near[distance] if distance < 2 else others[test.split("::")[0]]).append(test)
        in_turns = chain.from_iterable(zip_longest(*others.values()))
        chosen: list[str] = []
        spent = 0.0
        for test in [*near[0], *near[1], *(test for test in in_turns if test)]:
            if spent + self.seconds[test] > budget and chosen:
                continue
            chosen.append(test)
            spent += self.seconds[test]
        return chosen


def _distance(source: str, test: str) -> int:
    """0: the test file is named after the module or its package; 1: it lies in the folder of the same name; 2: elsewhere."""
    parts = Path(source).with_suffix("").parts[1:]
    words = {parts[-1].strip("_"), *(parts[1:-1])}
    stem = Path(test).stem.removeprefix("test_")
    if test.startswith(f"tests/{parts[0]}/") or len(parts) == 1:
        return 0 if any(word and word in stem for word in words) else 1
    return 2
