"""`TrainingRunner`: the whole loop around any module and optimizer, on one rank or many, resuming from the newest checkpoint."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..checkpoint.bridge import to_optimizer_state_dict, to_state_dict
from ..checkpoint.training_graph import GraphOptimizer, TrainingGraph, unwrap
from ..errors import CheckpointError, UnsupportedError
from ..formats import load
from ..pytorch_private import is_fsdp
from ..storage.paths import refuse_existing
from . import distributed
from .config import RunnerConfig
from .entry import MANIFEST, read_entry
from .feed import Feed
from .loggers import MetricsLogger
from .manager import CheckpointManager
from .reporting import PERFORMANCE, Bar, Board, Clock, write_performance
from .sampler import sharded

log = logging.getLogger(__name__)

Loss = Callable[[nn.Module, Any], Any]
"""(model, batch) -> the loss, or a tuple whose first element is the loss."""

Metric = Callable[[Any, Any], "float | Mapping[str, float]"]
"""(outputs, batch) -> one number, or several by name; averaged over the samples of the evaluation."""


class StepMode(Enum):
    """What a step does, in ORT's terms."""

    MODEL_UPDATE = "ModelUpdateStep"
    GRADIENT_ACCUMULATE = "GradientAccumulateStep"
    EVALUATE = "EvaluateStep"


@dataclass(frozen=True)
class Event:
    """Passed to callbacks after each step, evaluation (`values` are the metrics) and checkpoint (`path`)."""

    kind: str
    mode: StepMode
    step: int
    values: dict[str, float] = field(default_factory=dict)
    path: Path | None = None


@dataclass
class Result:
    """How a run ended. `preempted`: SIGTERM was received; run it again to resume from the newest checkpoint."""

    step: int
    weight_updates: int
    skipped_updates: int
    epoch: int
    loss: float
    metrics: dict[str, float]
    resumed_from: int | None
    preempted: bool


class TrainingRunner:
    """Trains `model` according to `config`.

    - `loss` computes the loss of a batch; by default the batch is the model's arguments and the model returns the loss (`OrtModule` does).
    - `metric` adds figures to the evaluation, `post_evaluation` is called with all of them, `callbacks` with every `Event`.
    - `scheduler` replaces `config.lr`; it steps after each weight update.
    - `loggers` get the metrics, as TensorBoard does with `config.log_dir`: `CSVLogger`, `JSONLinesLogger`, ... or your own.
    - `export` writes the inference model at the end, for modules that can't themselves (`OrtModule` can).

    Under `torchrun` the process group is joined, the model is wrapped in DistributedDataParallel (unless it is sharded or wrapped
    already) and every rank draws its share of the data.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: RunnerConfig,
        *,
        loss: Loss | None = None,
        metric: Metric | None = None,
        post_evaluation: Callable[[dict[str, float], int], None] | None = None,
        scheduler: Any = None,
        callbacks: Sequence[Callable[[Event], None]] = (),
        loggers: Sequence[MetricsLogger] = (),
        export: Callable[[nn.Module, Path], None] | None = None,
    ) -> None:
        self.config, self.optimizer = config, optimizer
        self._graph_optimizer = optimizer if isinstance(optimizer, GraphOptimizer) else None
        self._loss, self._metric, self._post_evaluation = loss or _direct, metric, post_evaluation
        self._callbacks, self._loggers, self._export = list(callbacks), list(loggers), export
        inner = unwrap(model)
        if config.mapped_dimensions:
            _fix_dimensions(inner, config.mapped_dimensions)
        if config.export_path is not None and export is None and not isinstance(inner, TrainingGraph):
            raise UnsupportedError(f"a {type(inner).__name__} can't export itself", field="export_path", remedy="Pass export= a function.")
        distributed.start()
        self._ranks = distributed.Ranks()
        self.model = distributed.data_parallel(model)
        self.scheduler = scheduler or (config.lr.scheduler(optimizer, config.updates) if config.lr is not None else None)
        self.scaler = _scaler(config.loss_scale, next(inner.parameters()).device.type)
        self.step = self.weight_updates = self.skipped_updates = 0
        self.last_loss: torch.Tensor | None = None
        self.metrics: dict[str, float] = {}
        self.gradient_norm: torch.Tensor | None = None
        self._feed: Feed | None = None

    def run(self, train_loader: Iterable[Any], test_loader: Iterable[Any] | None = None) -> Result:
        """Train to `num_train_steps`, from the newest checkpoint if there is one."""
        config = self.config
        self._feed = feed = Feed(_shard(train_loader, config.seed))
        tests = _shard(test_loader, config.seed) if test_loader is not None else None
        preempted, mode = False, StepMode.MODEL_UPDATE
        with contextlib.ExitStack() as stack:
            manager = stack.enter_context(self._manager()) if config.checkpoints_dir is not None else None
            board = stack.enter_context(contextlib.closing(Board(config.log_dir, self._loggers)))
            resumed_from = self._start_from(manager)
            bar, clock = stack.enter_context(Bar(config.num_train_steps, config.progress_bar)), Clock()
            while self.step < config.num_train_steps:
                batch = next(feed)
                mode = self.train_step(batch)
                clock.count(_samples(batch), config.num_train_steps)
                updated = mode is StepMode.MODEL_UPDATE
                if self.step % config.display_loss_steps == 0:
                    self._display(bar, board, clock)
                if updated and self.weight_updates % config.histogram_period == 0:
                    board.weights(self.step, unwrap(self.model))
                if updated and tests is not None and config.evaluation_period and self.weight_updates % config.evaluation_period == 0:
                    board.scalars(self.step, {f"evaluation/{name}": value for name, value in self.evaluate(tests).items()})
                for callback in self._callbacks:
                    callback(Event("step", mode, self.step))
                if manager is not None:
                    preempted = (updated or not distributed.is_sharded(self.model)) and manager.preempted()
                    if preempted or (updated and manager.due(self.weight_updates)):
                        self._save(manager, mode)
                    if preempted:
                        break
            if manager is not None:
                saved = self._save_last(manager, mode)
                if preempted:
                    log.warning("SIGTERM received, stopping at step %d: %s", self.step, "saved" if saved else "could not be saved")
            self._finish(clock, preempted)
        return self._result(resumed_from, preempted)

    def train_step(self, batch: Any) -> StepMode:
        """One batch: forward and backward, and the weight update when it closes an accumulation window."""
        window = self.config.gradient_accumulation_steps
        closing = (self.step + 1) % window == 0
        model, optimizer, scaler = self.model, self.optimizer, self.scaler
        if not model.training:
            model.train()
        with _without_sync(model, closing):
            loss = _first(self._loss(model, batch))
            scaled = loss / window if window > 1 else loss
            (scaler.scale(scaled) if scaler is not None else scaled).backward()
        self.last_loss = loss.detach()
        self.step += 1
        if not closing:
            return StepMode.GRADIENT_ACCUMULATE
        if self.config.max_grad_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            self.gradient_norm = nn.utils.clip_grad_norm_(model.parameters(), self.config.max_grad_norm)
        if scaler is None:
            optimizer.step()
            done = self._graph_optimizer.updated if self._graph_optimizer is not None else True
        else:
            done = self._scaled_update(scaler)
        optimizer.zero_grad(set_to_none=True)
        if done:
            self.weight_updates += 1
            if self.scheduler is not None:
                self.scheduler.step()
        else:
            self.skipped_updates += 1
        return StepMode.MODEL_UPDATE

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Loss and metrics over the loader, on the eval graph, averaged over samples and ranks."""
        model = unwrap(self.model)
        was_training = model.training
        model.eval()
        sums: dict[str, float] = {"loss": 0.0}
        count = 0
        try:
            for batch in loader:
                outputs = self._loss(model, batch)
                found = {"loss": float(_first(outputs))}
                if self._metric is not None:
                    value = self._metric(outputs, batch)
                    found |= (
                        {str(name): float(number) for name, number in value.items()}
                        if isinstance(value, Mapping)
                        else {"metric": float(value)}
                    )
                size = _samples(batch)
                count += size
                for name, number in found.items():
                    sums[name] = sums.get(name, 0.0) + number * size
        finally:
            model.train(was_training)
        parts = self._ranks.gather((sums, count))
        total = sum(size for _, size in parts)
        if not total:
            raise CheckpointError("the test loader yields no batch", remedy="Give it data, or omit test_loader.")
        self.metrics = {name: sum(part[name] for part, _ in parts) / total for name in sums}
        if self._post_evaluation is not None:
            self._post_evaluation(self.metrics, self.step)
        for callback in self._callbacks:
            callback(Event("evaluation", StepMode.EVALUATE, self.step, self.metrics))
        return self.metrics

    # Inside the loop

    def _scaled_update(self, scaler: Any) -> bool:
        before = scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        done = bool(scaler.get_scale() >= before)  # the scale decreases exactly when an update was skipped
        if not done and self.config.loss_scale != "dynamic":
            scaler.update(float(self.config.loss_scale or 1.0))
        return done

    def _display(self, bar: Bar, board: Board, clock: Clock) -> None:
        values = {"loss": float(self.last_loss if self.last_loss is not None else "nan"), "lr": float(self.optimizer.param_groups[0]["lr"])}
        rate = clock.throughput() * self._ranks.count
        bar.show(self.step, **values, rate=rate)
        more = {"throughput": rate}
        if self.gradient_norm is not None:
            more["gradient_norm"] = float(self.gradient_norm)
        if self.scaler is not None:
            more["loss_scale"] = float(self.scaler.get_scale())
        board.scalars(self.step, values | more)
        log.info("step %d loss %g lr %g %.1f samples/s", self.step, values["loss"], values["lr"], rate)

    def _save(self, manager: CheckpointManager, mode: StepMode) -> None:
        path = manager.save(
            self.weight_updates,
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            data=self._feed,
            progress=self._progress(),
            metrics=self.metrics or {"train_loss": float(self.last_loss if self.last_loss is not None else "nan")},
            gradients=mode is StepMode.GRADIENT_ACCUMULATE,
        )
        for callback in self._callbacks:
            callback(Event("checkpoint", mode, self.step, self.metrics, path))

    def _save_last(self, manager: CheckpointManager, mode: StepMode) -> bool:
        """Save at the end of the run; returns whether it succeeded. If failures are only warnings, it is tried twice."""
        for _ in range(2):
            manager.wait()
            if manager.last_saved != self.weight_updates:
                self._save(manager, mode)
        manager.wait()
        return manager.last_saved == self.weight_updates

    def _progress(self) -> dict[str, int | float | str]:
        epoch = self._feed.epoch if self._feed is not None else 0
        return {
            "step": self.step,
            "weight_updates": self.weight_updates,
            "skipped_updates": self.skipped_updates,
            "epoch": epoch,
            "round": epoch,
            "samples": self._feed.samples if self._feed is not None else 0,
        }

    # Before and after it

    def _manager(self) -> CheckpointManager:
        config = self.config
        return CheckpointManager(
            config.checkpoints_dir or "",
            period=config.checkpoint_period,
            max_num_checkpoints=config.max_num_checkpoints,
            keep_best=config.keep_best,
            mode=config.keep_best_mode,
            async_save=config.async_save,
            on_error=config.on_save_error,
        )

    def _start_from(self, manager: CheckpointManager | None) -> int | None:
        parts: dict[str, Any] = {"scheduler": self.scheduler, "scaler": self.scaler, "data": self._feed}
        progress: dict[str, Any] = {}
        entry = manager.restore(self.model, self.optimizer, progress=progress, **parts) if manager and self.config.resume else None
        if entry is None:  # a run that resumes replaces its own results
            self._ranks.first(self._refuse_existing)
        source = self.config.checkpoint_to_load_path
        if entry is None and source is not None:
            if (Path(source) / MANIFEST).exists():
                reader = manager or CheckpointManager(Path(source).parent)
                entry = reader.restore(self.model, self.optimizer, progress=progress, entry=read_entry(Path(source)), **parts)
            else:
                _load_weights(self.model, self.optimizer, source)
        if entry is None:
            return None
        self.step, self.weight_updates = int(progress["step"]), int(progress["weight_updates"])
        self.skipped_updates = int(progress["skipped_updates"])
        log.info("resumed from %s at step %d", entry.path, self.step)
        return self.step

    def _refuse_existing(self) -> None:
        """Before the first step, not at the end of a long run."""
        config = self.config
        if config.export_path is not None:
            refuse_existing(config.export_path, config.overwrite, "export_path")
        if config.perf_output_dir is not None:
            refuse_existing(Path(config.perf_output_dir) / PERFORMANCE, config.overwrite, "perf_output_dir")

    def _finish(self, clock: Clock, preempted: bool) -> None:
        if distributed.rank() != 0 or preempted:
            return
        config, model = self.config, unwrap(self.model)
        if config.perf_output_dir is not None:
            report = clock.report(type(model).__name__, self.weight_updates, self.skipped_updates, self._ranks.count)
            write_performance(config.perf_output_dir, report)
        if config.export_path is not None:
            if self._export is not None:
                self._export(model, Path(config.export_path))
            elif isinstance(model, TrainingGraph):
                model.export_inference(config.export_path, config.export_outputs, overwrite=True)

    def _result(self, resumed_from: int | None, preempted: bool) -> Result:
        loss = float(self.last_loss) if self.last_loss is not None else float("nan")
        epoch = self._feed.epoch if self._feed is not None else 0
        return Result(self.step, self.weight_updates, self.skipped_updates, epoch, loss, dict(self.metrics), resumed_from, preempted)


def _direct(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _first(outputs: Any) -> torch.Tensor:
    found = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise CheckpointError("the model does not return a loss (one number)", remedy="Pass loss= a function of (model, batch).")
    return found


def _samples(batch: Any) -> int:
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else [batch]
    return next((len(value) for value in values if isinstance(value, torch.Tensor) and value.ndim), 1)


def _shard(loader: Iterable[Any], seed: int) -> Iterable[Any]:
    return sharded(loader, seed) if isinstance(loader, torch.utils.data.DataLoader) else loader


def _scaler(scale: float | str | None, device: str) -> Any:
    """PyTorch's GradScaler. A static scale never grows, and is reset after an overflow."""
    if scale is None:
        return None
    if scale == "dynamic":
        return torch.amp.GradScaler(device)
    return torch.amp.GradScaler(device, init_scale=float(scale), growth_interval=2**31 - 1)


def _without_sync(model: nn.Module, closing: bool) -> Any:
    """Synchronize gradients between ranks only at the end of an accumulation window."""
    if is_fsdp(model):
        choose: Any = model.set_requires_gradient_sync
        choose(closing)
    elif not closing and isinstance(model, nn.parallel.DistributedDataParallel):
        return model.no_sync()
    return contextlib.nullcontext()


def _fix_dimensions(model: nn.Module, dimensions: Mapping[str, int]) -> None:
    if not isinstance(model, TrainingGraph):
        raise UnsupportedError(f"a {type(model).__name__} has no symbolic dimensions", field="mapped_dimensions", remedy="OrtModule has.")
    model.fix_dimensions(dimensions)


def _load_weights(model: nn.Module, optimizer: Optimizer, source: Any) -> None:
    """Start from a checkpoint of any format: weights, and the optimizer's state where there is one."""
    inner, state = unwrap(model), load(source)
    if isinstance(inner, TrainingGraph):
        own = optimizer if isinstance(optimizer, GraphOptimizer) else None
        inner.load_checkpoint(state, own)
        if own is not None:
            return
    else:
        inner.load_state_dict(to_state_dict(state))
    if any(group.states for group in state.optimizer.values()):
        optimizer.load_state_dict(to_optimizer_state_dict(state, optimizer, module=inner))
