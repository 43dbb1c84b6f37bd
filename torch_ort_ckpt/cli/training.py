"""The commands around training: `train`, `resume` and `checkpoints`."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import inspect
import json
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.state import format_bytes
from ..errors import CheckpointError, MissingDependencyError, MissingFileError
from ..storage.paths import PathLike, refuse_url
from . import pages
from .output import console, print_json, print_line, progress_bar, sparkline, table
from .writing import escaped

if TYPE_CHECKING:
    from ..report.runs import Point

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
    from .. import report

    if options.html:
        return pages.write_run(options)
    with progress_bar("reading", 0) as advance:
        found = report.points(options.paths, statistics=options.stats, progress=advance)
    if options.verify:
        for point in found:
            point.problem = _damage(point)
    if options.json:
        print_json([_as_json(point) for point in found])
    elif not found:
        print_line("no checkpoints here")
    else:
        _print_run(found, len(options.paths) > 1, options.verify)
    return 1 if any(point.problem for point in found) else 0


def _damage(point: Point) -> str | None:
    from ..operations.verify import verify
    from ..training.entry import read_entry

    try:
        if point.run:
            read_entry(point.path.parent).verify()
        elif problems := verify(point.path).problems:
            return problems[0]
    except CheckpointError as error:
        return str(error)
    return point.problem


def _as_json(point: Point) -> dict[str, Any]:
    inside = point.path.parent if point.run else point.path
    content: dict[str, Any] = {"step": point.step, "path": str(inside), "metrics": point.metrics, "bytes": point.nbytes}
    content |= {"ranks": point.ranks, "created": point.created, "problem": point.problem}
    if point.weights is not None:
        content |= {"lr": point.rate, "weights": point.weights, "moments": point.moments}
    return content


def _print_run(found: list[Point], several: bool, verified: bool) -> None:
    """A row for each checkpoint, and a line that shows how each metric went."""
    names = sorted({name for point in found for name in point.metrics})
    moments = sorted({name for point in found for name in point.moments})
    measured = any(point.weights is not None for point in found)
    numbers = ["step", *names, *(["lr", "norm of weights", *(f"{name} RMS" for name in moments)] if measured else [])]
    rows = []
    for point in found:
        values = [point.metrics.get(name) for name in names]
        values += [point.rate, point.weights, *(point.moments.get(name) for name in moments)] if measured else []
        shown = ["" if value is None else f"{value:.5g}" for value in values]
        saved = datetime.datetime.fromtimestamp(point.created).isoformat(" ", "seconds") if point.created else ""
        state = point.problem or ("verified" if verified else "complete")
        rows.append(
            [
                *([point.run or point.path.name] if several else []),
                point.step,
                *shown,
                format_bytes(point.nbytes),
                point.ranks,
                saved,
                state,
            ]
        )
    columns = [*(["run"] if several else []), *numbers, "size", "ranks", "saved", "state"]
    console().print(table(None, columns, rows, right=[*numbers, "size", "ranks"]))
    for name in names:
        for run in dict.fromkeys(point.run for point in found):
            line = [point.metrics[name] for point in found if point.run == run and name in point.metrics]
            if len(line) > 2 and (curve := sparkline(line)):
                print_line(f"{escaped(f'{run} ' if several else '')}{escaped(name)} {curve} {line[0]:.4g} to {line[-1]:.4g}")


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

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # untyped
        """As YAML 1.2 and JSON have it, 1e-2 is a number; for PyYAML, which follows YAML 1.1, it is text."""

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
    )
    try:
        return yaml.load(text, Loader)
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
    loaders = tuple(found) if isinstance(found, tuple) or _is_pair(found) else (found,)
    bad = [type(item).__name__ for item in loaders if isinstance(item, (str, bytes)) or not hasattr(item, "__iter__")]
    if bad or not 1 <= len(loaders) <= 2:
        raise CheckpointError(
            f"{name} returned {bad[0] if bad else f'{len(loaders)} loaders'}, not a loader or two",
            field="data",
            remedy="Return the train loader, or (train loader, test loader); a loader is iterable and gives a batch at a time.",
        )
    return loaders


def _is_pair(found: object) -> bool:
    """Whether a list holds the loaders, and is not itself a loader: a list of batches."""
    batches = (tuple, list, dict, torch.Tensor)
    return isinstance(found, list) and len(found) <= 2 and not any(isinstance(item, batches) for item in found)
