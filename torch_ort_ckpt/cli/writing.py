"""Shared by the commands that write: their options, and how they report the result."""

from __future__ import annotations

import argparse
import os
from typing import Any

from rich.markup import escape

from ..checkpoint.state import CheckpointState
from ..errors import CheckpointError, printable


def command(subparsers: Any, name: str, run: Any, summary: str, **more: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, description=summary, **more)
    parser.set_defaults(run=run)
    return parser


def add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace an existing destination")
    parser.add_argument("--no-fsync", action="store_true", help="do not wait for the disk: faster, not safe against power loss")
    parser.add_argument(
        "--external-data", action=argparse.BooleanOptionalAction, default=None, help="ort: tensor data in DST.data (default: by size)"
    )
    parser.add_argument(
        "--groups", choices=("single", "merge", "keep"), help="ort, pbseq: several optimizer groups: refuse, fold into one, or keep"
    )
    parser.add_argument("--max-shard-size", type=_parse_size, metavar="SIZE", help="safetensors: start a new file beyond this (e.g. 2GB)")


def writing_options(options: argparse.Namespace, target: str) -> dict[str, Any]:
    owners = {
        "external_data": ("ort", "onnx"),
        "groups": ("ort", "pbseq"),
        "version": ("ort",),
        "max_shard_size": ("safetensors",),
        "model": ("onnx",),
    }
    chosen = {name: getattr(options, name, None) for name in owners}
    for name, value in chosen.items():
        if value is not None and target not in owners[name]:
            raise CheckpointError(
                f"--{name.replace('_', '-')} is for format {owners[name][0]!r}, the destination is {target!r}",
                remedy="Leave the option out, or choose the format with --to.",
            )
    return {name: value for name, value in chosen.items() if value is not None}


def size_of(path: str) -> int:
    """Bytes on disk, for progress bars; 0 (unknown) where it can't be told."""
    try:
        if os.path.isdir(path):
            return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
        return os.path.getsize(path) + (os.path.getsize(f"{path}.data") if os.path.exists(f"{path}.data") else 0)
    except OSError:
        return 0


def escaped(text: str) -> str:
    return escape(printable(text))


def contents(state: CheckpointState) -> str:
    return escaped(repr(state).removeprefix("CheckpointState(").removesuffix(")"))


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
