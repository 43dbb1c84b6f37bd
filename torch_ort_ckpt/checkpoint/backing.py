"""The files behind a state's tensors: which ones, how large, and when their pages may go."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..storage.buffers import FileBuffer
from .state import CheckpointState


def backed_by(state: CheckpointState, buffers: Iterable[FileBuffer]) -> CheckpointState:
    """The same state, which now knows the files that its tensors alias. Readers call it."""
    state._buffers = tuple(buffers)
    return state


def release_pages(*states: CheckpointState) -> None:
    """Let the system drop the pages read so far, so that a pass over all tensors takes the memory of one.

    Only for states that nobody else has: values that were changed in memory would be lost.
    """
    for state in states:
        for buffer in state._buffers:
            buffer.release()


def buffers_behind(state: CheckpointState) -> tuple[FileBuffer, ...]:
    """The mapped or read files that the state's tensors alias."""
    return tuple(state._buffers)


def files_behind(state: CheckpointState) -> list[Path]:
    return [Path(buffer.path) for buffer in buffers_behind(state)]


def bytes_on_disk(state: CheckpointState) -> int | None:
    """The size of the files behind the state; None if there are none."""
    return sum(buffer.size for buffer in state._buffers) if state._buffers else None
