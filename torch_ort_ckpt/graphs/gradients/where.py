"""Which line of the user's code something comes from: a node of a traced graph, or an exception."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

_OURS = str(Path(__file__).parents[2])
_REWRITES = str(Path(__file__).parent / "decompositions")
"""Ours too, but called by PyTorch in the midst of the user's code."""
_NOT_THE_USERS = tuple({str(Path(torch.__file__).parent), _OURS, *(sysconfig.get_path(key) for key in ("stdlib", "platstdlib"))})
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]*)(?:\n +(?P<code>[^\n]+))?')


def line_of_node(node: fx.Node) -> str | None:
    """`file:line: code` of the innermost frame outside PyTorch, as PyTorch recorded it when it traced the node."""
    return _innermost(
        (found["file"], int(found["line"]), found["code"] or "") for found in _FRAME.finditer(node.meta.get("stack_trace") or "")
    )


def line_of_error(error: BaseException) -> str | None:
    """The same for an exception, or for the one that caused it."""
    seen: BaseException | None = error
    while seen is not None:
        frames = traceback.extract_tb(seen.__traceback__)
        if found := _innermost((frame.filename, frame.lineno or 0, frame.line or "") for frame in frames):
            return found
        seen = seen.__cause__ or seen.__context__
    return None


def line_of_stack(stack: traceback.StackSummary | None) -> str | None:
    """The same for a stack: what our own code called, not what called it."""
    frames = list(stack or ())[:-1]  # without the function that noted it
    ours = [place for place, frame in enumerate(frames) if frame.filename.startswith(_OURS) and not frame.filename.startswith(_REWRITES)]
    return _innermost((frame.filename, frame.lineno or 0, frame.line or "") for frame in frames[ours[-1] if ours else 0 :])


def first_line(error: BaseException) -> str:
    """What an exception says, without the pages that PyTorch's tracers and exporters add."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()]
    text = next((line for line in lines if line), "")
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def line_of_operator(operator: str, nodes: Sequence[fx.Node]) -> str | None:
    """The line of the first forward operator that `operator` (`aten.convolution_backward.default`) can come from.

    PyTorch forgets the lines when it makes the joint graph: they are looked up in the graph that was captured before it, by name.
    """
    stem = _stem(operator)
    candidates: list[tuple[int, fx.Node]] = []
    for node in nodes:
        name = _stem(str(node.target))
        if node.op == "call_function" and name and stem and (name.startswith(stem) or stem.startswith(name)):
            candidates.append((abs(len(name) - len(stem)), node))
    for _, node in sorted(candidates, key=lambda item: item[0]):
        if found := line_of_node(node):
            return found
    return None


def _stem(operator: str) -> str:
    """`convolution` of `aten._convolution_backward.default`."""
    name = operator.rpartition("::")[2].removeprefix("aten.").partition(".")[0].strip("_")
    for part in ("native_", "_with_indices", "_with_logits", "_loss", "_nd", "_backward", "_forward"):
        name = name.replace(part, "")
    return {"conv1d": "convolution", "conv2d": "convolution", "conv3d": "convolution", "conv": "convolution"}.get(name, name)


def _innermost(frames: Iterable[tuple[str, int, str]]) -> str | None:
    users: list[Any] = [frame for frame in frames if not frame[0].startswith(_NOT_THE_USERS) and not _made_up(frame[0])]
    if not users:
        return None
    file, line, code = users[-1]
    return f"{file}:{line}: {code.strip()}".rstrip(": ")


def _made_up(file: str) -> bool:
    """Whether it is no file but code that PyTorch or Python made; notebooks have such names too."""
    return file.startswith("<") and not file.startswith(("<ipython", "<stdin"))
