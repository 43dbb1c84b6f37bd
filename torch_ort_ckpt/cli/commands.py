"""The commands on checkpoints. Each calls one function of the library and shows the result."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ..catalog import FLOAT_DTYPES
from ..checkpoint.state import CheckpointState, format_bytes
from ..errors import CheckpointError, MissingFileError
from ..formats import detect, exists, format_for, load, read_by, save
from ..operations.average import average
from ..operations.convert import convert, destination_of
from ..operations.diff import diff
from ..operations.summarize import Summary, TensorSummary, summarize
from ..operations.verify import Verification, verify
from ..storage.files import warn
from ..storage.paths import already_there
from . import pages
from .output import console, error_console, print_error, print_json, print_line, progress_bar, table
from .writing import contents, escaped, size_of, writing_options, written_files

# inspect


def run_inspect(options: argparse.Namespace) -> int:
    if options.html:
        return pages.write_inspection(options)
    artifacts = _artifacts(options.path)
    if artifacts is not None and artifacts.checkpoint_path is None:
        _describe(artifacts)
        return 0
    with progress_bar("reading", size_of(options.path)) as advance:
        found = summarize(options.path, format=options.format, statistics=not options.no_stats, progress=advance)
    if options.json:
        graphs = {} if artifacts is None else {"artifacts": artifacts.as_json()}
        print_json({**dataclasses.asdict(found), "total_bytes": found.total_bytes, **graphs})
        return 0
    out = console()
    if artifacts is not None:
        _describe(artifacts)
        print_line("")
    version = f" version {found.format_version}" if found.format_version else ""
    nominal = ", nominal (no data)" if found.nominal else ""
    print_line(f"[bold]{escaped(found.path)}[/]: {found.format}{version}{nominal}, {format_bytes(found.total_bytes)} in tensors")
    print_line(f"readable as it is by {escaped(found.read_by)}\n")
    if found.tensors:
        out.print(_tensor_table(found))
    if found.groups:
        columns = ("group", "step", "initial lr", "lr", "parameters", "moments", "size")
        rows = [
            (
                name,
                g["step"],
                f"{g['initial_lr']:g}",
                "-" if g["lr"] is None else f"{g['lr']:g}",
                g["parameters"],
                " ".join(g["moments"]),
                format_bytes(g["nbytes"]),
            )
            for name, g in found.groups.items()
        ]
        out.print()
        out.print(table("optimizer", columns, rows, right=("step", "initial lr", "lr", "parameters", "size")))
    if found.properties:
        values = [(name, type(value).__name__, _shortened(value)) for name, value in sorted(found.properties.items())]
        out.print()
        out.print(table("properties", ("name", "type", "value"), values))
    return 0


def _artifacts(path: str) -> Any:
    """The training artifacts in a folder; None where there are none."""
    if not os.path.isdir(path):
        return None
    from ..graphs.artifacts import Artifacts

    try:
        return Artifacts.load(path)
    except MissingFileError:
        return None


def _describe(artifacts: Any) -> None:
    for line in artifacts.describe().splitlines():
        print_line(escaped(line))


def _tensor_table(found: Summary) -> Any:
    columns = ["name", "kind", "dtype", "shape", "size", "moments"]
    numbers = ["min", "max", "mean", "std", "nan", "inf"]
    with_numbers = any(item.statistics for item in found.tensors)
    rows = [_tensor_row(item, with_numbers, found.nominal) for item in found.tensors]
    return table(None, columns + (numbers if with_numbers else []), rows, right=["size", *numbers])


def _tensor_row(item: TensorSummary, with_numbers: bool, nominal: bool) -> list[str]:
    moments = " ".join(name.replace("momentum", "m") for name in item.moments)
    shape = "unknown" if nominal else "x".join(map(str, item.shape)) or "scalar"
    row = [item.name, item.kind, item.dtype, shape, format_bytes(item.nbytes), moments]
    if with_numbers and item.statistics:
        s = item.statistics
        row += [f"{s.minimum:.4g}", f"{s.maximum:.4g}", f"{s.mean:.4g}", f"{s.std:.4g}", str(s.nan or ""), str(s.inf or "")]
    elif with_numbers:
        row += [""] * 6
    return row


# convert, upgrade


def run_convert(options: argparse.Namespace) -> int:
    target = destination_of(options.source, options.destination, options.to)[1]
    _convert(
        options,
        to_format=target,
        from_format=options.from_format,
        dtype=getattr(torch, FLOAT_DTYPES[options.dtype]) if options.dtype else None,
        names=options.name_map,
        include_optimizer=not options.no_optimizer,
        include_mixed_precision=options.mixed_precision,
        upcast_half=options.upcast_half,
        verify=not options.no_verify,
        **writing_options(options, target),
    )
    return 0


def run_upgrade(options: argparse.Namespace) -> int:
    if options.destination is None and os.path.isdir(options.source):
        raise CheckpointError("a folder, which a file can't replace", path=options.source, remedy="Say where the upgraded file goes: DST.")
    options.destination = options.destination or options.source
    aliases = len(load(options.source).mixed_precision)  # before the source may be replaced
    state = _convert(options, to_format="ort", **writing_options(options, "ort"))
    if aliases:
        warn(f"{options.source}: {aliases} half-precision aliases are left out: ORT reads no file with them, and their masters are here")
    if (readers := read_by("ort", options.destination)).startswith("no release"):
        warn(f"{options.destination}: readable by {readers}")
    if state.partitions:
        warn(f"{options.source} is one rank of a partitioned set and holds its share only: merge the set for a whole checkpoint")
    return 0


def _convert(options: argparse.Namespace, **more: Any) -> CheckpointState:
    with progress_bar("writing", size_of(options.source)) as advance:
        state = convert(
            options.source, options.destination, overwrite=options.overwrite, durable=not options.no_fsync, progress=advance, **more
        )
    place, kind = destination_of(options.source, options.destination, more["to_format"])
    written = load(place, format=kind)
    checked = ", verified" if more.get("verify", True) else ""
    print_line(f"{escaped(os.fspath(place))}: {kind}, {contents(written)}{checked}")
    if len(files := written_files(place, written)) > 1:
        for file in files:
            print_line(f"  {escaped(file)}")
    return state


# diff, verify, average


def run_diff(options: argparse.Namespace) -> int:
    if options.html:
        return pages.write_comparison(options)
    with progress_bar("comparing", size_of(options.a) + size_of(options.b)) as advance:
        report = diff(options.a, options.b, atol=options.atol, rtol=options.rtol, progress=advance)
    if options.json:
        print_json(report.to_json())
    elif report.equal:
        print_line(f"equal: {report.compared} compared")
    else:
        columns = ("what", "difference", "changed", "max |a-b|", "mean |a-b|", "relative")
        rows = [
            (
                d.name,
                d.what,
                *(
                    ("",) * 4
                    if d.changed is None
                    else (f"{d.changed}/{d.total}", f"{d.max_abs:.4g}", f"{d.mean_abs:.4g}", f"{d.relative:.4g}")
                ),
            )
            for d in report
        ]
        console().print(table(f"{len(report)} of {report.compared} differ", columns, rows, right=columns[2:]))
    return 0 if report.equal else 1


def run_verify(options: argparse.Namespace) -> int:
    results, missing = [], False
    for path in options.paths:
        with progress_bar("verifying", size_of(path)) as advance:
            try:
                _must_exist(path)
                results.append(verify(path, repair=options.repair, progress=advance))
            except MissingFileError as error:  # an error of the command; the other files are still looked at
                missing = True
                print_error(str(error))
                if options.json:
                    results.append(Verification(path, problems=[str(error)]))
    if options.json:
        print_json([{**dataclasses.asdict(result), "ok": bool(result)} for result in results])
    else:
        for result in results:
            repaired = ", repaired" if result.repaired else ""
            if result:
                print_line(f"{escaped(result.path)}: ok ({result.format}, {result.tensors} tensors{repaired})")
            for problem in result.problems:
                print_line(f"[red]{escaped(result.path)}[/]: {escaped(problem.removeprefix(f'{result.path}: '))}")
    if missing:
        return 2
    return 0 if all(results) else 1


def _must_exist(path: str) -> None:
    """A missing file is an error of the command; an unreadable one is a result."""
    try:
        detect(path)
    except MissingFileError:
        raise
    except CheckpointError:
        pass


def run_average(options: argparse.Namespace) -> int:
    target = options.to or format_for(options.output)
    more = writing_options(options, target)
    if not options.overwrite and exists(options.output):
        raise already_there(options.output)
    with progress_bar("averaging", sum(map(size_of, options.paths))) as advance:
        state = average(options.paths, options.weights, skip_bad=options.skip_bad, progress=advance)
    save(state, options.output, format=target, overwrite=options.overwrite, durable=not options.no_fsync, **more)
    print_line(f"{escaped(options.output)}: average of {len(options.paths)}, {contents(state)}")
    return 0


def run_demo(options: argparse.Namespace) -> int:
    from .demo import demo

    with contextlib.ExitStack() as stack:
        folder = Path(options.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="torch-ort-ckpt-")))
        stages = demo(folder, options.overwrite)
        print_line(f"A LeNet-5 learns digits in {len(stages)} stages. It takes about half a minute.\n")
        for number, stage in enumerate(stages, 1):
            print_line(f"[bold]{number}. {stage.title}[/] ({stage.who})")
            started = time.perf_counter()
            with error_console().status("working") if error_console().is_terminal else contextlib.nullcontext():
                outcome = stage.run()
            print_line(f"   {escaped(outcome)}  [dim]{time.perf_counter() - started:.1f} s[/]\n   [dim]{stage.why}[/]")
    if options.folder:
        print_line(f"\nThe files are in {escaped(options.folder)}: try `torch-ort-ckpt inspect {escaped(options.folder)}/trained`.")
    return 0


def _shortened(value: object, limit: int = 200) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
