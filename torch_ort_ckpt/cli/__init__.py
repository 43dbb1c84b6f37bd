"""The command line: thin parsing over importable functions. Exit codes: 0 done, 1 the answer is no (different, damaged), 2 an error."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import CheckpointError, CheckpointWarning
from ..storage.paths import refuse_url
from .parser import build_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    with _any_encoding():
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with warnings.catch_warnings():
        warnings.simplefilter("always", CheckpointWarning)
        warnings.showwarning = _print_warning
        try:
            for value in vars(options).values():
                for item in value if isinstance(value, list) else [value]:
                    refuse_url(item)
            return int(options.run(options))
        except (CheckpointError, OSError) as error:
            from .output import print_error

            print_error(str(error))
        except KeyboardInterrupt:
            from .output import error_console

            error_console().print("interrupted")
            return 130
    return 2


def _print_warning(message: Any, *_: Any, **__: Any) -> None:
    from .output import print_warning  # imports rich, which most commands need and `completion` does not

    print_warning(message)


@contextlib.contextmanager
def _any_encoding() -> Iterator[None]:
    """In this block, characters that the console or a redirection does not have (cp1252, cp437, cp932) are shown as escapes."""
    streams = [(stream, stream.errors) for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    for stream, _ in streams:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream, errors in streams:
            with contextlib.suppress(ValueError, OSError):  # closed, or its reader is gone
                stream.reconfigure(errors=errors)
