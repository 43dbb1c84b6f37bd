"""The argument parser: every command and its options. Imports nothing heavy, so that `--help` and completion answer at once."""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module
from typing import Any

from .. import __version__
from ..catalog import FLOAT_DTYPES, FORMATS, WRITABLE
from . import completion


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torch-ort-ckpt",
        description="ONNX Runtime training checkpoints: inspect, convert to PyTorch and safetensors and back, compare, average.",
        epilog="Exit codes: 0 done, 1 the answer is no (different, damaged), 2 an error. `torch-ort-ckpt COMMAND --help` for each command.",
    )
    parser.add_argument("--version", action="version", version=f"torch-ort-ckpt {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=completion.CommandParser)
    _add_all(subparsers)
    completion.add(subparsers, parser)
    return parser


def _add_all(subparsers: Any) -> None:
    """Every command, in the order of `--help`."""
    _add_inspect(subparsers)
    _add_convert(subparsers)
    _add_upgrade(subparsers)
    _add_diff(subparsers)
    _add_verify(subparsers)
    _add_average(subparsers)
    _add_merge(subparsers)
    _add_split(subparsers)
    _add_step_model(subparsers)
    _add_training(subparsers)
    _add_demo(subparsers)
    _add_doctor(subparsers)


def _add_inspect(subparsers: Any) -> None:
    parser = _command(
        subparsers, "inspect", "commands.run_inspect", "Show what is in a checkpoint: tensors, optimizer state, properties, statistics."
    )
    parser.add_path("path")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of tables")
    parser.add_argument("--no-stats", action="store_true", help="structure only: does not read the tensors' data")
    parser.add_argument("--format", choices=FORMATS, help="do not detect the format")
    parser.add_path("--html", metavar="FILE", help="write a page with table, histograms and charts, for a browser, instead")
    _add_overwrite(parser)


def _add_convert(subparsers: Any) -> None:
    parser = _command(
        subparsers, "convert", "commands.run_convert", "Convert a checkpoint to another format, and verify it by reading it back."
    )
    parser.add_path("source", metavar="SRC")
    parser.add_path("destination", metavar="DST", help="its suffix chooses the format: .safetensors, .pt, .bin, .ckpt, none for ort")
    parser.add_argument("--to", choices=WRITABLE, help="format of DST, where the name does not say")
    parser.add_argument("--from", dest="from_format", choices=FORMATS, help="format of SRC, instead of detecting it")
    parser.add_argument(
        "--dtype", choices=sorted(FLOAT_DTYPES), metavar="DTYPE", help=f"convert floating-point weights: {', '.join(sorted(FLOAT_DTYPES))}"
    )
    parser.add_path("--name-map", metavar="JSON", help='file of {"ort name": "torch name" or {"name": ..., "transpose": true}}')
    parser.add_argument("--no-optimizer", action="store_true", help="leave the optimizer state out")
    parser.add_argument(
        "--mixed-precision",
        action="store_true",
        help="write the half-precision aliases too (ort: no release of ORT reads them)",
    )
    parser.add_argument("--upcast-half", action="store_true", help="give weights that exist only as <w>_fp16 an fp32 master")
    parser.add_argument("--version", type=int, choices=(1, 2), help="ort: 1 for devices on ORT 1.16 / 1.17, 2 (default) for 1.18 and later")
    parser.add_path("--model", metavar="ONNX", help="onnx: the model whose initializers take the weights (default: DST itself)")
    parser.add_argument("--no-verify", action="store_true", help="do not read the result back")
    _add_writing(parser)


def _add_upgrade(subparsers: Any) -> None:
    parser = _command(
        subparsers, "upgrade", "commands.run_upgrade", "Turn an old checkpoint into one that current ORT (1.18 and later) reads."
    )
    parser.add_path("source", metavar="SRC")
    parser.add_path("destination", metavar="DST", nargs="?", help="default: SRC itself, with --overwrite")
    _add_writing(parser)


def _add_diff(subparsers: Any) -> None:
    parser = _command(
        subparsers, "diff", "commands.run_diff", "Show what differs between two checkpoints, and by how much. Exit code 1 when they differ."
    )
    parser.add_path("a")
    parser.add_path("b")
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance (default 0: bit for bit)")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    parser.add_path("--html", metavar="FILE", help="write a page with the change of each tensor plotted, for a browser, instead")
    _add_overwrite(parser)


def _add_verify(subparsers: Any) -> None:
    parser = _command(
        subparsers, "verify", "commands.run_verify", "Check that checkpoints are whole and free of NaN and infinity. Exit code 1 when not."
    )
    parser.add_path("paths", nargs="+", metavar="PATH")
    parser.add_argument("--repair", action="store_true", help="complete a save that was interrupted between renaming its files")
    parser.add_argument("--json", action="store_true", help="print a JSON document")


def _add_average(subparsers: Any) -> None:
    parser = _command(
        subparsers, "average", "commands.run_average", "Average checkpoints (federated averaging) in the memory of one model."
    )
    parser.add_path("paths", nargs="+", metavar="PATH")
    parser.add_path("-o", "--output", required=True, metavar="DST")
    parser.add_argument(
        "--weights", type=_parse_weights, metavar="W,W,...", help="e.g. the number of samples behind each; default: all equal"
    )
    parser.add_argument("--skip-bad", action="store_true", help="leave out checkpoints with NaN or infinite values (else refused)")
    parser.add_argument("--to", choices=WRITABLE, help="format of DST, where the name does not say")
    _add_writing(parser)


def _add_merge(subparsers: Any) -> None:
    parser = _command(
        subparsers, "merge", "ranks.run_merge", "Merge the ranks of a distributed run (ZeRO, Megatron, pipeline) into one checkpoint."
    )
    parser.add_path("paths", nargs="+", metavar="RANKS... DST", help="rank files in any order, a folder of them, or a glob; then DST")
    parser.add_argument("--to", choices=WRITABLE, help="format of DST, where the name does not say")
    parser.add_argument("--stages", action="store_true", help="RANKS are pipeline stages in order, which do not say their place themselves")
    parser.add_argument("--mixed-precision", action="store_true", help="write the half-precision aliases too")
    _add_writing(parser)


def _add_split(subparsers: Any) -> None:
    parser = _command(
        subparsers, "split", "ranks.run_split", "Cut a checkpoint into the ranks of a distributed run, one file (or folder) each, in DST."
    )
    parser.add_path("source", metavar="SRC", help="a checkpoint, or a rank set to be split differently")
    parser.add_path("destination", metavar="DST", help="folder for the rank files: rank_0, rank_1, ... with the format's suffix")
    parser.add_path(
        "--plan",
        required=True,
        metavar="JSON",
        help='a file, or the text itself: {"data_parallel_size": 2, "horizontal_parallel_size": 2, "columns": [...], "rows": [...]}',
    )
    parser.add_argument("--to", choices=WRITABLE, help="format of the ranks (default: that of SRC, or ort where it can't be written)")
    _add_writing(parser)


def _add_step_model(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        "step-model",
        "graphs.run_step_model",
        "Write one ONNX graph that trains, for any onnxruntime, from training artifacts.",
        "Write step_model.onnx, a graph of standard operators that computes one whole training step (loss, gradients, update), and "
        "state.safetensors, the parameters and moments it starts from. Any onnxruntime runs it: the stock package, the browser, phones.",
    )
    parser.add_path("artifacts", metavar="ARTIFACTS", help="folder with training_model.onnx, optimizer_model.onnx and checkpoint")
    parser.add_path("folder", metavar="DST", help="folder for the two files")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="update once in N batches, with the sum of their gradients")
    parser.add_argument("--max-norm", type=float, metavar="X", help="clip the gradients' common norm (default: as the optimizer graph)")
    parser.add_argument("--optimizer", choices=("adamw", "adam", "sgd"), help="with PyTorch's defaults, instead of the artifacts' own")
    parser.add_path("--checkpoint", metavar="FILE", help="start from this checkpoint instead of the artifacts' own")
    _add_overwrite(parser)


def _add_training(subparsers: Any) -> None:
    train = _command(
        subparsers,
        "train",
        "training.run_train",
        "Train artifacts as a configuration file says.",
        "Train artifacts. The file names them, the data (`module:function`, which returns the train loader or train and test loader) and "
        "the runner's settings. Under torchrun it trains on all ranks. Where checkpoints exist already, it goes on from the newest. "
        "Exit code 143 when SIGTERM ended it, with everything saved.",
    )
    train.add_path("config", help="YAML or JSON file")
    train.add_argument("--steps", type=int, metavar="N", help="instead of runner.num_train_steps")
    resume = _command(
        subparsers,
        "resume",
        "training.run_resume",
        "Go on with a run from its newest checkpoint.",
        "Go on with a run from its newest whole checkpoint, with the configuration it was started with.",
    )
    resume.add_path("directory", help="the run's checkpoints_dir")
    resume.add_argument("--steps", type=int, metavar="N", help="train to this step instead of the configured one")
    listing = _command(
        subparsers,
        "checkpoints",
        "training.run_checkpoints",
        "List a directory of checkpoints, or show how a run went.",
        "List the entries of checkpoint directories: steps, metrics, sizes and state. Several directories, or single checkpoints (the "
        "rounds of a federated server), stand side by side. Exit code 1 when one is damaged.",
    )
    listing.add_path("paths", metavar="DIR", nargs="+")
    listing.add_argument("--stats", action="store_true", help="also the learning rate and the size of weights and moments (reads the data)")
    listing.add_path("--html", metavar="FILE", help="write a page with the curves of all these, for a browser, instead")
    _add_overwrite(listing)
    listing.add_argument("--verify", action="store_true", help="read every byte and compare checksums")
    listing.add_argument("--json", action="store_true", help="print a JSON document")


def _add_demo(subparsers: Any) -> None:
    parser = _command(
        subparsers, "demo", "commands.run_demo", "Export, train with ORT, convert to PyTorch and safetensors and back, on built-in data."
    )
    parser.add_path("folder", nargs="?", help="where to leave the files; default: a temporary folder")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier demo left there")


def _add_doctor(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        "doctor",
        "machine.run_doctor",
        "What works on this machine, what does not, and the command that fixes it. Exit code 1 on a problem.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    parser.add_argument(
        "--cuda", action="store_true", help="train small models on the GPU instead and compare them with the CPU; takes a few minutes"
    )


def _command(subparsers: Any, name: str, run: str, summary: str, description: str | None = None) -> completion.CommandParser:
    """A command that calls `run`, written "module.function". The module, which imports torch, is imported when the command runs."""
    parser: completion.CommandParser = subparsers.add_parser(name, help=summary, description=description or summary)
    parser.set_defaults(run=partial(_import_and_run, run))
    return parser


def _import_and_run(run: str, options: argparse.Namespace) -> int:
    module, _, function = run.partition(".")
    return int(getattr(import_module(f".{module}", __package__), function)(options))


def _add_overwrite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace an existing destination")


def _add_writing(parser: argparse.ArgumentParser) -> None:
    _add_overwrite(parser)
    parser.add_argument("--no-fsync", action="store_true", help="do not wait for the medium: faster, not safe against power loss")
    parser.add_argument(
        "--external-data", action=argparse.BooleanOptionalAction, default=None, help="ort: tensor data in DST.data (default: by size)"
    )
    parser.add_argument(
        "--groups", choices=("single", "merge", "keep"), help="ort, pbseq: several optimizer groups: refuse, fold into one, or keep"
    )
    parser.add_argument("--max-shard-size", type=_parse_size, metavar="SIZE", help="safetensors: start a new file beyond this (e.g. 2GB)")


def _parse_weights(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 100,250,80") from error


def _parse_size(text: str) -> int:
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
    number = text.rstrip("KMGIBkmgib")
    try:
        size = int(float(number) * units[text[len(number) :].strip().upper()])
    except (ValueError, KeyError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 500MB or 2GiB") from error
    if size <= 0:
        raise argparse.ArgumentTypeError("a size must be positive")
    return size
