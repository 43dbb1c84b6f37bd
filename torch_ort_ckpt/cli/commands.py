"""The commands on checkpoints. Each parses its options, calls one function of the library and shows the result."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.state import CheckpointState, format_bytes
from ..dtypes import TORCH_FROM_ONNX, short_name
from ..errors import CheckpointError, MissingFileError
from ..formats import FORMATS, WRITABLE, detect, exists, format_for, load, read_by, save
from ..operations.average import average
from ..operations.convert import convert
from ..operations.diff import diff
from ..operations.summarize import Summary, TensorSummary, summarize
from ..operations.verify import verify
from ..storage.files import warn
from . import completion, machine, pages, ranks, training
from .output import console, print_json, print_line, progress_bar, table
from .writing import add_writing, command, contents, escaped, size_of, writing_options

_DTYPES = {short_name(dtype): dtype for dtype in TORCH_FROM_ONNX.values() if dtype.is_floating_point}
_DTYPES |= {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}


def add_all(subparsers: Any) -> None:
    """Every command, in the order of `--help`."""
    _add_inspect(subparsers)
    _add_convert(subparsers)
    _add_upgrade(subparsers)
    _add_diff(subparsers)
    _add_verify(subparsers)
    _add_average(subparsers)
    ranks.add_merge(subparsers)
    ranks.add_split(subparsers)
    training.add_all(subparsers)
    _add_demo(subparsers)
    machine.add_doctor(subparsers)
    completion.add(subparsers)


# inspect


def _add_inspect(subparsers: Any) -> None:
    parser = command(subparsers, "inspect", run_inspect, "Show what is in a checkpoint: tensors, optimizer state, properties, statistics.")
    parser.add_argument("path")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of tables")
    parser.add_argument("--no-stats", action="store_true", help="structure only: does not read the tensors' data")
    parser.add_argument("--format", choices=FORMATS, help="do not detect the format")
    parser.add_argument("--html", metavar="FILE", help="write a page with table, histograms and charts, for a browser, instead")


def run_inspect(options: argparse.Namespace) -> int:
    if options.html:
        return pages.write_inspection(options)
    with progress_bar("reading", size_of(options.path)) as advance:
        found = summarize(options.path, format=options.format, statistics=not options.no_stats, progress=advance)
    if options.json:
        print_json({**dataclasses.asdict(found), "total_bytes": found.total_bytes})
        return 0
    out = console()
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


def _add_convert(subparsers: Any) -> None:
    parser = command(subparsers, "convert", run_convert, "Convert a checkpoint to another format, and verify it by reading it back.")
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("destination", metavar="DST", help="its suffix chooses the format: .safetensors, .pt, .bin, .ckpt, none for ort")
    parser.add_argument("--to", choices=WRITABLE, help="format of DST, where the name does not say")
    parser.add_argument("--from", dest="from_format", choices=FORMATS, help="format of SRC, instead of detecting it")
    parser.add_argument(
        "--dtype", choices=sorted(_DTYPES), metavar="DTYPE", help=f"convert floating-point weights: {', '.join(sorted(_DTYPES))}"
    )
    parser.add_argument("--name-map", metavar="JSON", help='file of {"ort name": "torch name" or {"name": ..., "transpose": true}}')
    parser.add_argument("--no-optimizer", action="store_true", help="leave the optimizer state out")
    parser.add_argument(
        "--mixed-precision",
        action="store_true",
        help="write the half-precision aliases too (ort: no release of ORT reads them)",
    )
    parser.add_argument("--upcast-half", action="store_true", help="give weights that exist only as <w>_fp16 an fp32 master")
    parser.add_argument("--version", type=int, choices=(1, 2), help="ort: 1 for devices on ORT 1.16 / 1.17, 2 (default) for 1.18 and later")
    parser.add_argument("--model", metavar="ONNX", help="onnx: the model whose initializers take the weights (default: DST itself)")
    parser.add_argument("--no-verify", action="store_true", help="do not read the result back")
    add_writing(parser)


def run_convert(options: argparse.Namespace) -> int:
    target = options.to or format_for(options.destination)
    _convert(
        options,
        to=target,
        from_format=options.from_format,
        dtype=_DTYPES[options.dtype] if options.dtype else None,
        names=options.name_map,
        include_optimizer=not options.no_optimizer,
        include_mixed_precision=options.mixed_precision,
        upcast_half=options.upcast_half,
        verify=not options.no_verify,
        **writing_options(options, target),
    )
    return 0


def _add_upgrade(subparsers: Any) -> None:
    parser = command(subparsers, "upgrade", run_upgrade, "Turn an old checkpoint into one that current ORT (1.18 and later) reads.")
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("destination", metavar="DST", nargs="?", help="default: SRC itself, with --overwrite")
    add_writing(parser)


def run_upgrade(options: argparse.Namespace) -> int:
    if options.destination is None and os.path.isdir(options.source):
        raise CheckpointError("a folder, which a file can't replace", path=options.source, remedy="Say where the upgraded file goes: DST.")
    options.destination = options.destination or options.source
    aliases = len(load(options.source).mixed_precision)  # before the source may be replaced
    state = _convert(options, to="ort", **writing_options(options, "ort"))
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
    print_line(f"{escaped(options.destination)}: {more['to']}, {contents(state)}")
    return state


# diff, verify, average


def _add_diff(subparsers: Any) -> None:
    parser = command(
        subparsers, "diff", run_diff, "Show what differs between two checkpoints, and by how much. Exit code 1 when they differ."
    )
    parser.add_argument("a")
    parser.add_argument("b")
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance (default 0: bit for bit)")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    parser.add_argument("--html", metavar="FILE", help="write a page with the change of each tensor plotted, for a browser, instead")


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


def _add_verify(subparsers: Any) -> None:
    parser = command(
        subparsers, "verify", run_verify, "Check that checkpoints are whole and free of NaN and infinity. Exit code 1 when not."
    )
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument("--repair", action="store_true", help="complete a save that was interrupted between renaming its files")
    parser.add_argument("--json", action="store_true", help="print a JSON document")


def run_verify(options: argparse.Namespace) -> int:
    results = []
    for path in options.paths:
        _must_exist(path)
        with progress_bar("verifying", size_of(path)) as advance:
            results.append(verify(path, repair=options.repair, progress=advance))
    if options.json:
        print_json([{**dataclasses.asdict(result), "ok": bool(result)} for result in results])
    else:
        for result in results:
            repaired = ", repaired" if result.repaired else ""
            if result:
                print_line(f"{escaped(result.path)}: ok ({result.format}, {result.tensors} tensors{repaired})")
            for problem in result.problems:
                print_line(f"[red]{escaped(result.path)}[/]: {escaped(problem.removeprefix(f'{result.path}: '))}")
    return 0 if all(results) else 1


def _must_exist(path: str) -> None:
    """A missing file is an error of the command; an unreadable one is a result."""
    try:
        detect(path)
    except MissingFileError:
        raise
    except CheckpointError:
        pass


def _add_average(subparsers: Any) -> None:
    parser = command(subparsers, "average", run_average, "Average checkpoints (federated averaging) in the memory of one model.")
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument("-o", "--output", required=True, metavar="DST")
    parser.add_argument(
        "--weights", type=_parse_weights, metavar="W,W,...", help="e.g. the number of samples behind each; default: all equal"
    )
    parser.add_argument("--skip-bad", action="store_true", help="leave out checkpoints with NaN or infinite values (else refused)")
    parser.add_argument("--to", choices=WRITABLE, help="format of DST, where the name does not say")
    add_writing(parser)


def run_average(options: argparse.Namespace) -> int:
    target = options.to or format_for(options.output)
    more = writing_options(options, target)
    if not options.overwrite and exists(options.output):
        raise CheckpointError("exists already", path=options.output, remedy="Pass --overwrite to replace it.")
    with progress_bar("averaging", sum(map(size_of, options.paths))) as advance:
        state = average(options.paths, options.weights, skip_bad=options.skip_bad, progress=advance)
    save(state, options.output, format=target, overwrite=options.overwrite, durable=not options.no_fsync, **more)
    print_line(f"{escaped(options.output)}: average of {len(options.paths)}, {contents(state)}")
    return 0


def _add_demo(subparsers: Any) -> None:
    parser = command(subparsers, "demo", run_demo, "Export, train with ORT, convert to PyTorch and safetensors and back, on built-in data.")
    parser.add_argument("folder", nargs="?", help="where to leave the files; default: a temporary folder")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier demo left there")


def run_demo(options: argparse.Namespace) -> int:
    from .demo import demo

    with contextlib.ExitStack() as stack:
        folder = Path(options.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="torch-ort-ckpt-")))
        rows = [dataclasses.astuple(row) for row in demo(folder, options.overwrite)]
    console().print(table("What was done", ("stage", "by", "files", "result"), rows))
    if options.folder:
        print_line(f"\nThe files are in {escaped(options.folder)}: try `torch-ort-ckpt inspect {escaped(options.folder)}/trained`.")
    return 0


def _parse_weights(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 100,250,80") from error


def _shortened(value: object, limit: int = 200) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
