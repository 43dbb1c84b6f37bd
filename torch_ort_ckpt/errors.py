"""What can go wrong, under one root: every error a user can cause is a `CheckpointError`.

Each carries the file, the field inside it and what to do, so that the message alone is enough to act on.
"""

from __future__ import annotations

import os


class CheckpointError(Exception):
    """Root of all errors of this library. `path`, `field` and `remedy` are also kept as attributes."""

    usual_remedy: str | None = None
    """What to do about this kind of error, unless a remedy is given where it is raised."""

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        field: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.message = message
        self.path = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
        self.field = field
        self.remedy = remedy or self.usual_remedy
        super().__init__(message)

    def __str__(self) -> str:
        where = ": ".join(printable(part) for part in (self.path, self.field) if part)
        text = f"{where}: {printable(self.message)}" if where else printable(self.message)
        return f"{text.rstrip('.')}. {printable(self.remedy)}" if self.remedy else text

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword arguments would be lost by the default reduction, and worker processes hand errors back pickled.
        return _rebuild, (type(self), self.message, self.path, self.field, self.remedy)


class CorruptFileError(CheckpointError):
    """The bytes on disk are not what the format says they must be."""

    usual_remedy = "The file is damaged or cut short: get it again from its source, or use an older checkpoint."


class MissingFileError(CheckpointError, FileNotFoundError):
    """A file or folder that should be there is not."""

    usual_remedy = "Check the path."


class UnsupportedError(CheckpointError):
    """The request is understood, but this format, optimizer or graph can't hold or do it."""


class MissingDependencyError(CheckpointError, ImportError):
    """An optional package is needed; the remedy names the extra that brings it."""


class CheckpointWarning(UserWarning):
    """Something was left out, merged or repaired. Silence it with `warnings.filterwarnings`."""


_LONGEST = 1000


def _rebuild(kind: type[CheckpointError], message: str, path: str | None, field: str | None, remedy: str | None) -> CheckpointError:
    return kind(message, path=path, field=field, remedy=remedy)


def printable(text: str) -> str:
    """Names come from files: keep control characters, lone surrogates and endless ones out of terminals and logs."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return without_controls(text)


def without_controls(text: str, keep: str = "") -> str:
    """The text with every character that is not printable (or in `keep`) written as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
