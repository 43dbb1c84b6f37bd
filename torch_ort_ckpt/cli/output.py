"""What the terminal shows: tables, progress, errors. Colours and bars only on a terminal; `NO_COLOR` is honoured."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from ..errors import printable, without_controls

if TYPE_CHECKING:  # imports torch, which an error message can do without
    from ..storage.files import Progress as Advance


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader of our output has closed the pipe, as `head` does: not an error."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)


def console() -> Console:
    out = _Console(highlight=False)
    return out if out.is_terminal else _Console(highlight=False, width=200)  # piped: do not fold to a guessed width


def print_line(markup: str) -> None:
    """One line, however long."""
    console().print(without_controls(markup, keep="\n"), soft_wrap=True)


def error_console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_error(message: str) -> None:
    text = without_controls(message, keep="\n")
    error_console().print(f"[bold red]error:[/] {escape(text)}")


def print_warning(message: Any, *_: Any, **__: Any) -> None:
    """Replaces `warnings.showwarning`: the message without the source line."""
    error_console().print(f"[yellow]warning:[/] {escape(printable(str(message)))}")


def print_json(content: Any) -> None:
    """For programs: plain, one document, in ASCII. NaN and infinity, which JSON lacks, become strings."""
    print(json.dumps(_finite(content), indent=2).replace("\x7f", "\\u007f"))  # ASCII: it survives every console and redirection


def _finite(content: Any) -> Any:
    if isinstance(content, float) and (content != content or content in (float("inf"), float("-inf"))):
        return str(content)
    if isinstance(content, dict):
        return {str(key).encode("utf-8", "replace").decode(): _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return content.encode("utf-8", "replace").decode() if isinstance(content, str) else content


def table(title: str | None, columns: Iterable[str], rows: Iterable[Iterable[Any]], right: Iterable[str] = ()) -> Table:
    """A table; columns named in `right` are aligned to the right."""
    aligned = set(right)
    result = Table(title=escape(printable(title)) if title else None, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for name in columns:
        result.add_column(escape(printable(name)), justify="right" if name in aligned else "left", overflow="fold")
    for row in rows:
        result.add_row(*(escape(printable(str(cell))) for cell in row))
    return result


def sparkline(values: Sequence[float]) -> str:
    """The values as a line of small bars, at most 60; nothing where the terminal can't show them."""
    bars = "▁▂▃▄▅▆▇█"
    known = [value for value in values[:: max(1, len(values) // 60)] if math.isfinite(value)]
    if not known or not _encodable(bars):
        return ""
    low, high = min(known), max(known)
    return "".join(bars[int((value - low) / (high - low) * 7) if high > low else 0] for value in known)


def _encodable(text: str) -> bool:
    try:
        text.encode(console().encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


@contextlib.contextmanager
def progress_bar(title: str, total: int) -> Iterator[Advance]:
    """A progress bar of bytes on standard error, removed at the end; nothing if that is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=error_console(), transient=True, disable=not error_console().is_terminal) as bar:
        task = bar.add_task(title, total=total or None)
        yield lambda count: bar.advance(task, count)
