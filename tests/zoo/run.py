"""Run the zoo: each architecture in a process of its own, with a time limit. Results go to a file; the next run goes on from it.

python -m tests.zoo.run [name or pattern ...] [--results FILE] [--again] [--no-lengths]
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import json
import logging
import multiprocessing
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

import torch_ort_ckpt as toc

from .check import ENGINES, check
from .entry import Entry
from .table import ENTRIES

STAGES = ("export", *ENGINES, *(f"{engine} steps" for engine in ENGINES), "lengths")


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    chosen = [entry for entry in ENTRIES if not options.names or any(fnmatch.fnmatchcase(entry.name, one) for one in options.names)]
    results = {} if options.again or not options.results.exists() else _read(options.results)
    _warm_up()
    for entry in chosen:
        known = results.get(entry.name)
        if known is None or (options.failed and not _good(known)):
            results[entry.name] = result = _in_a_process(entry, options.timeout, not options.no_lengths)
            _write(options.results, results)
            seconds = sum(value for name, value in result.items() if name.endswith("seconds"))
            print(f"{entry.name:32} {seconds:6.1f} s  {_line(result)}", flush=True)
    found = [results[entry.name] for entry in chosen if entry.name in results]
    print(summary(found))
    return 0 if all(_good(result) for result in found) else 1


def summary(results: list[dict[str, Any]]) -> str:
    """How many of how many, and what misses, by operator."""
    lines = [f"\n{len(results)} architectures"]
    for stage in STAGES:
        tried = [result for result in results if stage in result]
        good = sum(result[stage] == "ok" for result in tried)
        wrong = sum(str(result[stage]).startswith("wrong") for result in tried)
        lines.append(f"  {stage:14} {good} of {len(tried)}" + (f", {wrong} wrong" if wrong else ""))
    missing: dict[str, list[str]] = collections.defaultdict(list)
    for result in results:
        if not _good(result):
            stage = next(stage for stage in STAGES if result.get(stage, "ok") != "ok")
            missing[result.get("operator") or f"{stage}: {result[stage][:140]}"].append(result["name"])
    if missing:
        lines.append("What misses:")
        lines += [f"  {reason}: {', '.join(names)}" for reason, names in sorted(missing.items(), key=lambda item: -len(item[1]))]
    return "\n".join(lines)


def _good(result: dict[str, Any]) -> bool:
    return all(result.get(stage, "ok") == "ok" for stage in STAGES)


def _line(result: dict[str, Any]) -> str:
    bad = [f"{stage}: {result[stage]}" for stage in STAGES if result.get(stage, "ok") != "ok"]
    return "; ".join(bad)[:600] or "ok"


def _warm_up() -> None:
    """One small export, so that each process inherits what PyTorch loads and builds for the first one: half of a small model's time."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        toc.export_artifacts(torch.nn.Linear(3, 2), torch.randn(4, 3), folder)


def _in_a_process(entry: Entry, timeout: float, lengths: bool) -> dict[str, Any]:
    """The result, or how the process ended: exporters and runtimes have been seen to crash and to hang."""
    context: Any = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(entry.name, theirs, lengths))
    process.start()
    theirs.close()
    failed = {"name": entry.name, "field": entry.field}
    try:
        if not ours.poll(timeout):
            return failed | {"export": f"no end after {timeout:.0f} s"}
        found: dict[str, Any] = ours.recv()
        return found
    except EOFError:
        process.join()
        return failed | {"export": f"the process died with code {process.exitcode}"}
    finally:
        if process.is_alive():
            process.join(10)
        if process.is_alive():
            process.kill()
        process.join()


def _child(name: str, pipe: Any, lengths: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    entry = next(entry for entry in ENTRIES if entry.name == name)
    pipe.send(check(entry, lengths))
    pipe.close()


def _read(path: Path) -> dict[str, dict[str, Any]]:
    return {result["name"]: result for result in json.loads(path.read_text())}


def _write(path: Path, results: dict[str, dict[str, Any]]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(list(results.values()), indent=1))
    part.replace(path)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.run", description="Export every architecture and compare it with PyTorch.")
    parser.add_argument("names", nargs="*", help="names or patterns (unet_*); without any, all")
    parser.add_argument("--results", type=Path, default=Path("zoo_results.json"), help="what earlier runs found is kept here")
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    parser.add_argument("--failed", action="store_true", help="run those again that failed")
    parser.add_argument("--no-lengths", action="store_true", help="leave out the second export, with a dynamic length")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one architecture")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
