"""The commands around training: `train`, `resume` and `checkpoints`."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.state import format_bytes
from ..errors import CheckpointError, MissingDependencyError, MissingFileError
from ..storage.paths import PathLike, refuse_url
from .output import console, print_json, print_line, table
from .writing import escaped

SAVED = "run.json"
"""The configuration of a run, kept in its checkpoint directory for `resume`."""


def run_train(options: argparse.Namespace) -> int:
    content = read_config(options.config)
    return train(content, Path(options.config).resolve().parent, options.steps)


def run_resume(options: argparse.Namespace) -> int:
    saved = Path(options.directory) / SAVED
    if not saved.is_file():
        raise MissingFileError("no run was started here", path=saved, remedy="`train` writes this file.")
    content = read_config(saved)
    return train(content["config"], Path(content["folder"]), options.steps)


def run_checkpoints(options: argparse.Namespace) -> int:
    from ..training.directory import list_entries

    if not Path(options.directory).is_dir():
        raise MissingFileError("no such folder", path=options.directory, remedy="Give the folder that a CheckpointManager saves to.")
    found = list_entries(Path(options.directory))
    problems = [entry.problem for entry in found]
    if options.verify:
        for index, entry in enumerate(found):
            try:
                entry.verify()
            except CheckpointError as error:
                problems[index] = str(error)
    if options.json:
        rows = [
            {
                "step": e.step,
                "path": str(e.path),
                "metrics": e.metrics,
                "bytes": e.nbytes,
                "ranks": e.ranks,
                "created": e.created,
                "problem": p,
            }
            for e, p in zip(found, problems, strict=True)
        ]
        print_json(rows)
    else:
        names = sorted({name for entry in found for name in entry.metrics})
        columns = ["step", *names, "size", "ranks", "saved", "state"]
        lines = [
            [
                entry.step,
                *(f"{entry.metrics[name]:.5g}" if name in entry.metrics else "" for name in names),
                format_bytes(entry.nbytes),
                entry.ranks,
                datetime.datetime.fromtimestamp(entry.created).isoformat(" ", "seconds") if entry.created else "",
                problem or ("verified" if options.verify else "complete"),
            ]
            for entry, problem in zip(found, problems, strict=True)
        ]
        if not found:
            print_line("no checkpoints here")
            return 0
        console().print(table(None, columns, lines, right=["step", *names, "size", "ranks"]))
    return 1 if any(problems) else 0


def train(content: Mapping[str, Any], folder: Path, steps: int | None = None) -> int:
    """Run a configuration; relative paths in it are meant from `folder`, which is also searched for the data function."""
    from ..runtime.module import OrtModule
    from ..runtime.optimizer import OrtOptimizer
    from ..training import distributed
    from ..training.config import RunnerConfig
    from ..training.entry import write_json
    from ..training.runner import TrainingRunner

    known = {"artifacts", "data", "data_arguments", "model", "optimizer", "runner"}
    if unknown := sorted(set(content) - known):
        raise CheckpointError(f"no such section: {', '.join(unknown)}", remedy=f"Known: {', '.join(sorted(known))}.")
    if missing := sorted({"artifacts", "data", "runner"} - set(content)):
        raise CheckpointError(f"missing: {', '.join(missing)}", remedy="See `torch-ort-ckpt train --help`.")
    refuse_url(content["artifacts"], "artifacts")
    settings = _absolute(content["runner"], folder)
    config = RunnerConfig.from_dict({**settings, "num_train_steps": steps} if steps is not None else settings)
    distributed.start()
    loaders = _data(content["data"], content.get("data_arguments") or {}, folder)
    try:
        model = OrtModule(folder / content["artifacts"], **(content.get("model") or {}))
        optimizer = OrtOptimizer(model, **(content.get("optimizer") or {}))
    except TypeError as error:
        raise CheckpointError(
            f"unusable settings ({error})",
            field="model, optimizer",
            remedy="They are the arguments of toc.OrtModule and toc.OrtOptimizer.",
        ) from error
    if config.checkpoints_dir is not None and distributed.rank() == 0:
        Path(config.checkpoints_dir).mkdir(parents=True, exist_ok=True)
        write_json(Path(config.checkpoints_dir) / SAVED, {"config": dict(content), "folder": str(folder)}, durable=True)
    result = TrainingRunner(model, optimizer, config).run(*loaders)
    if distributed.rank() == 0:
        resumed = f", resumed from step {result.resumed_from}" if result.resumed_from is not None else ""
        metrics = "".join(f", {escaped(name)} {value:.5g}" for name, value in result.metrics.items())
        if result.resumed_from == result.step:
            print_line(f"step {result.step}, {result.weight_updates} updates: nothing left to do. --steps N trains further.")
        else:
            print_line(f"step {result.step}, {result.weight_updates} updates, loss {result.loss:.5g}{metrics}{resumed}")
    distributed.stop()
    return 143 if result.preempted else 0


def read_config(path: PathLike) -> dict[str, Any]:
    """A YAML or JSON file as plain data."""
    place = Path(path)
    try:
        text = place.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise MissingFileError("no such file", path=path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"can't be read ({error})",
            path=path,
            remedy="`torch-ort-ckpt resume` takes a run's folder, `train` a YAML or JSON file." if place.is_dir() else "Give YAML or JSON.",
        ) from error
    try:
        content = json.loads(text) if place.suffix.lower() == ".json" else _yaml(text)
    except ValueError as error:
        raise CheckpointError(f"malformed ({error})", path=path) from error
    if not isinstance(content, dict):
        raise CheckpointError("must hold sections such as artifacts, data and runner", path=path)
    return content


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingDependencyError("YAML files need pyyaml", remedy="pip install pyyaml, or write the file as .json") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _absolute(settings: Any, folder: Path) -> dict[str, Any]:
    from ..training.config import RunnerConfig

    if not isinstance(settings, dict):
        raise CheckpointError("must be settings by name", field="runner")
    paths = {item.name for item in dataclasses.fields(RunnerConfig) if "PathLike" in str(item.type)}
    for name in paths & set(settings):
        refuse_url(settings[name], name)
    return {name: str(folder / value) if name in paths and value is not None else value for name, value in settings.items()}


def _data(name: str, arguments: Mapping[str, Any], folder: Path) -> tuple[Any, ...]:
    """(train loader, perhaps test loader) from the function called `module:function`."""
    module, _, function = str(name).partition(":")
    if not module or not function:
        raise CheckpointError(f"{name!r} is not module:function", field="data")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        make = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise CheckpointError(f"can't be imported ({error})", field="data", remedy=f"Put {module}.py next to the file.") from error
    if not callable(make):
        raise CheckpointError(f"{module} has no function {function}", field="data", remedy=f"Define it in {module}, or name another.")
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise CheckpointError(
            f"{name} does not take them ({error})", field="data_arguments", remedy=f"It takes {inspect.signature(make)}."
        ) from error
    try:
        found = make(**arguments)
    except Exception as error:  # the user's code: say where in it
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise CheckpointError(
            f"{name} failed ({type(error).__name__}: {error})",
            field="data",
            remedy=f"It was raised in {place.filename}, line {place.lineno}.",
        ) from error
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)
