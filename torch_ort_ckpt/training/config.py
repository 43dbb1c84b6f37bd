"""`RunnerConfig`: every setting of a run in one place, checked on construction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..storage.paths import PathLike, as_path, refuse_url
from .schedule import LearningRate


@dataclass(frozen=True)
class RunnerConfig:
    """Settings of `TrainingRunner`. Steps are batches per rank, as in ORT's runner; periods are in weight updates, except the display.

    - `mapped_dimensions` fixes symbolic dimensions of an `OrtModule`'s graph for the run.
    - `loss_scale`: a number, or "dynamic"; an update whose gradients overflow is skipped.
    - `checkpoint_to_load_path`: where a fresh run starts from: an entry, or a checkpoint of any format. Entries in `checkpoints_dir` win
      (unless `resume=False`), so that a restarted job continues.
    - `on_save_error`: "raise", or "warn" to continue without that save.
    - `export_path`: the inference model written at the end, with `export_outputs`.
    - `overwrite`: whether a fresh run may replace `export_path` and the performance file that are there (a resumed one replaces its own).
    """

    num_train_steps: int
    gradient_accumulation_steps: int = 1
    evaluation_period: int | None = None
    display_loss_steps: int = 10
    checkpoints_dir: PathLike | None = None
    checkpoint_period: int | None = None
    max_num_checkpoints: int | None = None
    keep_best: str | None = None
    keep_best_mode: str = "min"
    async_save: bool = False
    on_save_error: str = "raise"
    resume: bool = True
    checkpoint_to_load_path: PathLike | None = None
    mapped_dimensions: Mapping[str, int] = field(default_factory=dict)
    lr: LearningRate | None = None
    max_grad_norm: float | None = None
    loss_scale: float | str | None = None
    log_dir: PathLike | None = None
    histogram_period: int = 100
    perf_output_dir: PathLike | None = None
    export_path: PathLike | None = None
    export_outputs: tuple[str, ...] | None = None
    overwrite: bool = False
    seed: int = 0
    progress_bar: bool = True

    def __post_init__(self) -> None:
        for name in ("checkpoints_dir", "checkpoint_to_load_path", "perf_output_dir", "export_path"):
            refuse_url(getattr(self, name), name)
        for name in ("num_train_steps", "gradient_accumulation_steps", "display_loss_steps", "histogram_period"):
            _positive(name, getattr(self, name))
        for name in ("evaluation_period", "checkpoint_period", "max_num_checkpoints"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.num_train_steps % self.gradient_accumulation_steps:
            raise CheckpointError(
                f"{self.num_train_steps} is not a multiple of gradient_accumulation_steps = {self.gradient_accumulation_steps}",
                field="num_train_steps",
                remedy="The last batches would never update the weights.",
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise CheckpointError(f"must be positive, not {self.max_grad_norm}", field="max_grad_norm")
        if isinstance(self.loss_scale, str):
            _one_of("loss_scale", self.loss_scale, ("dynamic",))
        elif self.loss_scale is not None and not (self.loss_scale > 0 and math.isfinite(self.loss_scale)):
            raise CheckpointError(f'must be a positive number or "dynamic", not {self.loss_scale}', field="loss_scale")
        for name in ("checkpoints_dir", "checkpoint_to_load_path", "log_dir", "perf_output_dir", "export_path"):
            if getattr(self, name) is not None:
                as_path(getattr(self, name))
        _one_of("on_save_error", self.on_save_error, ("raise", "warn"))
        _one_of("keep_best_mode", self.keep_best_mode, ("min", "max"))
        for name in ("checkpoint_period", "max_num_checkpoints", "keep_best"):
            if getattr(self, name) is not None and self.checkpoints_dir is None:
                raise CheckpointError("needs checkpoints_dir", field=name)
        for name, size in self.mapped_dimensions.items():
            _positive(f"mapped_dimensions.{name}", size)

    @property
    def updates(self) -> int:
        """Weight updates of the whole run."""
        return self.num_train_steps // self.gradient_accumulation_steps

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunnerConfig:
        """From plain data, as in a YAML or JSON file; unknown settings raise an error."""
        known = {item.name for item in dataclasses.fields(cls)}
        if unknown := sorted(set(content) - known):
            raise CheckpointError(f"no such setting: {', '.join(unknown)}", remedy=f"Known: {', '.join(sorted(known))}.")
        values = dict(content)
        try:
            if isinstance(values.get("lr"), Mapping):
                values["lr"] = LearningRate(**values["lr"])
            elif values.get("lr") is not None:
                values["lr"] = LearningRate(initial=float(values["lr"]))
            if values.get("export_outputs") is not None:
                values["export_outputs"] = tuple(values["export_outputs"])
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(
                f"unusable settings ({error})", field="runner", remedy="RunnerConfig lists them with their types."
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` takes."""
        found = dataclasses.asdict(self)
        return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"must be a whole number of at least 1, not {value!r}", field=name)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise CheckpointError(f"{value!r} is not one of {', '.join(allowed)}", field=name)
