"""The output of a run: the progress bar of the first rank, TensorBoard, and the performance report."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from ..errors import MissingDependencyError
from ..storage.files import atomic_write, save_error
from ..storage.paths import PathLike
from .distributed import rank


class Bar:
    """Loss, learning rate and throughput on a terminal; nothing elsewhere and on other ranks."""

    def __init__(self, total: int, wanted: bool) -> None:
        console = Console(stderr=True)
        text = TextColumn("loss {task.fields[loss]:.4g}  lr {task.fields[lr]:.3g}  {task.fields[rate]:.1f} samples/s")
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn())
        shown = wanted and rank() == 0 and console.is_terminal
        self._progress = Progress(*columns, console=console, disable=not shown)
        self._task = self._progress.add_task("training", total=total, loss=float("nan"), lr=0.0, rate=0.0)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, step: int, **values: Any) -> None:
        self._progress.update(self._task, completed=step, **values)


class Board:
    """TensorBoard's event file, written by the first rank; does nothing without `log_dir`."""

    def __init__(self, log_dir: PathLike | None) -> None:
        self._writer: Any = None
        if log_dir is None or rank() != 0:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependencyError(
                "log_dir needs tensorboard", field="log_dir", remedy='pip install "torch-ort-ckpt[tensorboard]"'
            ) from error
        self._writer = SummaryWriter(str(log_dir))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def weights(self, step: int, model: nn.Module) -> None:
        """Histogram and norm of every parameter."""
        if self._writer is None:
            return
        for name, parameter in model.named_parameters():
            value = parameter.detach()
            self._writer.add_histogram(f"weights/{name}", value.cpu(), step)
            self._writer.add_scalar(f"norms/{name}", torch.linalg.vector_norm(value).item(), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Clock:
    """Batches, samples and seconds of this run; `stabilized` leaves the first quarter out."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.batches = self.samples = 0
        self.training = 0.0
        self._recent: deque[tuple[float, int]] = deque(maxlen=64)
        self._quarter: tuple[float, int] | None = None

    def count(self, samples: int, total_steps: int) -> None:
        self.batches += 1
        self.samples += samples
        if self._quarter is None and self.batches * 4 >= total_steps:
            self._quarter = (time.perf_counter(), self.samples)

    def throughput(self) -> float:
        """Recent samples per second on this rank."""
        self._recent.append((time.perf_counter(), self.samples))
        (start, before), (end, after) = self._recent[0], self._recent[-1]
        return (after - before) / (end - start) if end > start else 0.0

    def report(self, model: str, updates: int, skipped: int, ranks: int) -> dict[str, Any]:
        now = time.perf_counter()
        total = now - self.begun
        start, before = self._quarter or (self.begun, 0)
        return {
            "Model": model,
            "Ranks": ranks,
            "NumOfBatches": self.batches,
            "WeightUpdates": updates,
            "SkippedUpdates": skipped,
            "TotalTime": total,
            "Latency": 1000 * total / max(1, self.batches),
            "Throughput": ranks * self.samples / total if total else 0.0,
            "StabilizedThroughput": ranks * (self.samples - before) / (now - start) if now > start else 0.0,
            "Memory": _peak_memory(),
        }


PERFORMANCE = "perf_metrics.json"


def write_performance(folder: PathLike, content: Mapping[str, Any]) -> Path:
    """`perf_metrics.json`, with the names ORT's runner used: times in seconds, latency in milliseconds, memory in MB."""
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise save_error(error, folder) from error
    path = place / PERFORMANCE
    with atomic_write(path) as file:
        file.write(json.dumps(content, indent=2).encode())
    return path


def _peak_memory() -> float | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024
