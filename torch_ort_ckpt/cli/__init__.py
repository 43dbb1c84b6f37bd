"""The command line: thin parsing over importable functions. Exit codes: 0 done, 1 the answer is no (different, damaged), 2 an error."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Sequence

from ..errors import CheckpointError, CheckpointWarning
from ..storage.paths import refuse_url
from . import commands
from .output import error_console, print_error, print_warning


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with warnings.catch_warnings():
        warnings.simplefilter("always", CheckpointWarning)
        warnings.showwarning = print_warning
        try:
            for value in vars(options).values():
                for item in value if isinstance(value, list) else [value]:
                    refuse_url(item)
            return int(options.run(options))
        except CheckpointError as error:
            print_error(str(error))
        except OSError as error:
            print_error(str(error))
        except KeyboardInterrupt:
            error_console().print("interrupted")
            return 130
    return 2


def build_parser() -> argparse.ArgumentParser:
    from .. import __version__

    parser = argparse.ArgumentParser(
        prog="torch-ort-ckpt",
        description="ONNX Runtime training checkpoints: inspect, convert to PyTorch and safetensors and back, compare, average.",
        epilog="Exit codes: 0 done, 1 the answer is no (different, damaged), 2 an error. `torch-ort-ckpt COMMAND --help` for each command.",
    )
    parser.add_argument("--version", action="version", version=f"torch-ort-ckpt {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands.add_all(subparsers)
    return parser
