"""`CheckpointManager`: a directory of training checkpoints that stays valid when a run crashes.

A save is one rename; an old entry is deleted only after the new one is on disk; a resume uses the newest entry whose checksums
match.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..checkpoint.training_graph import unwrap
from ..errors import CheckpointError
from ..storage.files import save_error, warn
from ..storage.folders import PendingFolder
from ..storage.paths import PathLike, as_path
from . import directory as entries
from .capture import Captured, Training, capture, device_of, restore
from .distributed import Ranks, world_size
from .entry import READABLE, SHARED, Entry, FileRecord, best_of, checked_metrics, write_manifest, write_state, write_tree
from .preemption import Preemption
from .randomness import random_states

log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves, rotates and restores `checkpoint_<step>` entries in `directory`, which all ranks must see.

    - `period`: `due(step)` is true every so many weight updates.
    - `max_num_checkpoints`: how many of the newest to keep (None: all), plus the best by the metric `keep_best` (`mode` "min" or "max").
    - `async_save`: `save` only copies the state; writing happens in the background, one save at a time, and its error surfaces at the
      next call.
    - `on_error`: "raise", or "warn" to let the run go on when a save fails; earlier entries are intact either way.

    Under `torchrun` every rank makes the manager and calls the same methods at the same steps.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        period: int | None = None,
        max_num_checkpoints: int | None = None,
        keep_best: str | None = None,
        mode: str = "min",
        async_save: bool = False,
        on_error: str = "raise",
        durable: bool = True,
    ) -> None:
        for name, value in (("period", period), ("max_num_checkpoints", max_num_checkpoints)):
            if value is not None and value < 1:
                raise CheckpointError(f"must be at least 1, not {value}", field=name)
        for name, choice, allowed in (("mode", mode, ("min", "max")), ("on_error", on_error, ("raise", "warn"))):
            if choice not in allowed:
                raise CheckpointError(f"{choice!r} is not one of {', '.join(allowed)}", field=name)
        self.directory = Path(os.path.abspath(as_path(directory)))
        self.period, self.max_num_checkpoints = period, max_num_checkpoints
        self.keep_best, self.mode = keep_best, mode
        self.async_save, self.on_error, self.durable = async_save, on_error, durable
        self.preemption = Preemption()
        self._ranks = Ranks.own_group()
        self._caller = Ranks.own_group()  # the background save uses the other one at the same time
        self._damaged: set[Path] = set()
        self._left: set[Path] = set()
        self.last_saved: int | None = None
        """The newest step that is saved in this directory."""
        self._executor: ThreadPoolExecutor | None = None
        self._in_flight: tuple[int, Future[Path]] | None = None
        self._ranks.first(self._open)
        self._ranks.together(self._visible)

    def list(self) -> list[Entry]:
        """Every entry by step; `entry.problem` says why one is not complete."""
        return entries.list_entries(self.directory)

    def latest(self) -> Entry | None:
        """The newest complete entry (its bytes are checked by `restore`, or `entry.verify()`)."""
        return next((entry for entry in reversed(self.list()) if entry.problem is None and entry.path not in self._damaged), None)

    def best(self) -> Entry | None:
        """The entry with the best value of the monitored metric."""
        if self.keep_best is None:
            raise CheckpointError("no metric is monitored", field="keep_best", remedy="Pass keep_best= the name of one.")
        return best_of(self.list(), self.keep_best, self.mode)

    def due(self, step: int) -> bool:
        """Whether `step` weight updates are a multiple of the period and neither saved nor being saved in the background."""
        taken = (self.last_saved, self._in_flight[0] if self._in_flight is not None else None)
        return self.period is not None and step > 0 and step % self.period == 0 and step not in taken

    def preempted(self) -> bool:
        """Whether any rank received SIGTERM: the same answer on all ranks, so that all save at the same step."""
        return self._caller.any(self.preemption.requested)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        progress: Mapping[str, int | float | str] | None = None,
        metrics: Mapping[str, float] | None = None,
        gradients: bool = False,
    ) -> Path | None:
        """Save everything a resume needs as `checkpoint_<step>`; the path, or None when the save failed and `on_error` is "warn".

        With `async_save` this returns once the state is copied. `gradients=True` keeps the gradients too: for a save inside an
        accumulation window.
        """
        step, rated = _checked_step(step), checked_metrics(metrics or {})
        training = Training(model, optimizer, scheduler, scaler, data, dict(progress or {}), gradients)
        self.wait()
        taken: list[Captured] = []
        self._caller.together(lambda: taken.append(capture(training)))  # a rank that fails must not leave the others waiting
        captured = taken[0]
        if not self.async_save:
            return self._finish(step, lambda: self._write(step, captured, rated))
        copied = captured.staged()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_give_way)
        self._in_flight = step, self._executor.submit(self._write, step, copied, rated)
        return self.directory / f"checkpoint_{step}"

    def wait(self) -> Path | None:
        """Wait until the save in flight is on disk; raises its error."""
        if self._in_flight is None:
            return None
        (step, running), self._in_flight = self._in_flight, None
        return self._finish(step, running.result)

    def restore(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        progress: dict[str, int | float | str] | None = None,
        entry: Entry | None = None,
    ) -> Entry | None:
        """Continue from the newest entry that verifies (or from `entry`); None when there is none. `progress` receives the counters.

        Damaged entries are skipped with a warning. On another number of ranks than the entry was saved with, ranks beyond those keep
        their own random state.
        """
        self.wait()
        chosen = self._ranks.first(self._newest_whole if entry is None else lambda: _verified(entry))
        if chosen is None:
            return None
        training = Training(model, optimizer, scheduler, scaler, data, progress if progress is not None else {})
        self._ranks.together(lambda: self._restore(chosen, training))
        if chosen.path.parent == self.directory:
            self.last_saved = chosen.step
        return chosen

    def close(self) -> None:
        """Wait for the save in flight and stop listening for SIGTERM."""
        try:
            self.wait()
        finally:
            self.preemption.uninstall()
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None

    def __enter__(self) -> CheckpointManager:
        self.preemption.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Opening

    def _open(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            entries.clean(self.directory)
        except OSError as error:
            raise save_error(error, self.directory) from error

    def _visible(self) -> None:
        if not self.directory.is_dir():
            raise CheckpointError("this rank can't see the directory", path=self.directory, remedy="Use one that all ranks share.")

    # Saving, on every rank

    def _write(self, step: int, captured: Captured, metrics: dict[str, float]) -> Path:
        captured.wait()
        with contextlib.ExitStack() as stack:
            begun: list[PendingFolder] = []

            def begin() -> Path:
                begun.append(stack.enter_context(entries.pending_entry(self.directory, step)))
                return begun[0].path

            folder = self._ranks.first(begin)
            parts = self._ranks.together(lambda: self._write_files(folder, captured))
            files = {name: record for part in parts for name, record in part.items()}
            self._ranks.first(lambda: self._commit(begun[0], step, metrics, files))
        return self.directory / f"checkpoint_{step}"

    def _write_files(self, folder: Path, captured: Captured) -> dict[str, FileRecord]:
        records = write_tree(folder, f"rank_{self._ranks.rank}", *captured.local, durable=self.durable)
        if captured.state is not None and captured.shared is not None:
            records |= write_state(folder, captured.state, self.durable)
            records |= write_tree(folder, SHARED, *captured.shared, durable=self.durable)
        return records

    def _commit(self, pending: PendingFolder, step: int, metrics: dict[str, float], files: dict[str, FileRecord]) -> None:
        write_manifest(pending.path, step, self._ranks.count, metrics, files, self.durable)
        pending.commit(self.durable)
        self._damaged.discard(pending.target)
        log.info("saved %s", pending.target)
        self._rotate()

    def _rotate(self) -> None:
        """Delete entries beyond the limit; called only when a newer entry is durable. Foreign folders and unknown versions are kept."""
        if self.max_num_checkpoints is None:
            return
        found = self.list()
        whole = [entry for entry in found if entry.problem is None and entry.path not in self._damaged]
        kept = {entry.path for entry in whole[-self.max_num_checkpoints :]}
        if self.keep_best is not None and (best := best_of(whole, self.keep_best, self.mode)) is not None:
            kept.add(best.path)
        newest = max((entry.step for entry in whole), default=-1)
        for entry in found:
            if entry.path not in kept and entry.step < newest and entry.version in (0, *READABLE):
                self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        """Warn only if an old entry can't be deleted: the new checkpoint is saved."""
        try:
            reason = entries.remove(entry.path, entry.path.name)
        except OSError as error:
            reason = f"it can't be removed ({error.strerror})"
        if reason is not None and entry.path not in self._left:
            self._left.add(entry.path)
            warn(f"{entry.path} is kept: {reason}")

    def _finish(self, step: int, action: Callable[[], Path]) -> Path | None:
        """Run or await a save, and mark the step as saved only on success: a failed save may be tried again."""
        try:
            path = action()
        except CheckpointError as error:
            if self.last_saved == step:  # the existing entry is older than the one to be saved
                self.last_saved = None
            if self.on_error == "raise":
                raise
            warn(f"the checkpoint was not saved, training continues: {error}")
            return None
        self.last_saved = step
        return path

    # Restoring

    def _newest_whole(self) -> Entry | None:
        for entry in reversed(self.list()):
            try:
                return _verified(entry)
            except CheckpointError as error:
                self._damaged.add(entry.path)
                warn(f"skipping a damaged checkpoint: {error}")
        return None

    def _restore(self, entry: Entry, training: Training) -> None:
        state = entry.state()
        shared = entry.shared(state)
        mine = entry.local(min(self._ranks.rank, entry.ranks - 1))
        gradients = mine["gradients"]
        if entry.ranks != world_size():
            gradients = _regroup([entry.local(number)["gradients"] for number in range(entry.ranks)], world_size(), self._ranks.rank)
            if self._ranks.rank >= entry.ranks:
                mine = {**mine, "random": random_states(device_of(unwrap(training.model)))}
        restore(training, shared, mine, gradients)


def _give_way() -> None:
    """Lower the priority of the writing thread (Linux only), so that it does not slow down training."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _checked_step(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError as error:
        raise CheckpointError(f"must be a whole number, not {step!r}", field="step") from error
    if not 0 <= number < 2**63:
        raise CheckpointError(f"must be a non-negative integer, not {number}", field="step")
    return number


def _verified(entry: Entry) -> Entry:
    entry.verify()
    return entry


def _regroup(parts: list[Any], ranks: int, rank: int) -> dict[str, torch.Tensor] | None:
    """Partially accumulated gradients of all ranks for another number of ranks: the mean over ranks stays the same."""
    held = [part for part in parts if part]
    if not held or rank != 0:
        return {} if held else None
    names = {name for part in held for name in part}
    scale = ranks / len(parts)
    return {name: torch.stack([part[name] for part in held if name in part]).sum(0) * scale for name in names}
