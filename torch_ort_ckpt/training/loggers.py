"""Where a run's metrics go: one small protocol, and a class for each tracker. `TrainingRunner(loggers=[...])` takes any number of them."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from torch import nn

from ..errors import MissingDependencyError
from ..storage.files import save_error
from ..storage.paths import PathLike, as_path


class MetricsLogger(Protocol):
    """Takes the metrics of a run. Only the first rank calls it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Figures after this step; evaluations have names that begin with `evaluation/`."""

    def close(self) -> None:
        """The run has ended."""


class TensorBoardLogger:
    """TensorBoard's event files in a folder; the one that also takes histograms of weights."""

    def __init__(self, folder: PathLike) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependencyError(
                "log_dir needs tensorboard", field="log_dir", remedy='pip install "torch-ort-ckpt[tensorboard]"'
            ) from error
        self._writer: Any = SummaryWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_weights(self, step: int, model: nn.Module) -> None:
        """Histogram and norm of every parameter."""
        for name, parameter in model.named_parameters():
            value = parameter.detach()
            self._writer.add_histogram(f"weights/{name}", value.cpu(), step)
            self._writer.add_scalar(f"norms/{name}", torch.linalg.vector_norm(value).item(), step)

    def close(self) -> None:
        """Write what is left, and end."""
        self._writer.close()


class CSVLogger:
    """A table with the columns step, name and value. An existing file is continued."""

    def __init__(self, path: PathLike) -> None:
        self._file = _opened(path)
        self._rows = csv.writer(self._file, lineterminator="\n")
        if self._file.tell() == 0:
            self._rows.writerow(["step", "name", "value"])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        self._rows.writerows([step, name, repr(float(value))] for name, value in values.items())
        self._file.flush()

    def close(self) -> None:
        """Write what is left, and end."""
        self._file.close()


class JSONLinesLogger:
    """One JSON object a line, with `step` and the figures. An existing file is continued; NaN and infinity are null."""

    def __init__(self, path: PathLike) -> None:
        self._file = _opened(path)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        finite = {name: value if abs(value) < float("inf") else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Write what is left, and end."""
        self._file.close()


class MLflowLogger:
    """A run of MLflow, in the store of `tracking_uri` (MLflow's own default without it)."""

    def __init__(self, experiment: str = "torch_ort_ckpt", *, run_name: str | None = None, tracking_uri: str | None = None) -> None:
        mlflow = _imported("mlflow")
        self._client: Any = mlflow.MlflowClient(tracking_uri=tracking_uri)
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        self.run_id: str = self._client.create_run(number, run_name=run_name).info.run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        for name, value in values.items():
            self._client.log_metric(self.run_id, name, value, step=step)

    def close(self) -> None:
        """Write what is left, and end."""
        self._client.set_terminated(self.run_id)


class WandbLogger:
    """A run of Weights & Biases. `mode="offline"` writes to the folder `directory`; `wandb sync` uploads it later."""

    def __init__(
        self, project: str = "torch_ort_ckpt", *, mode: str = "offline", directory: PathLike | None = None, **options: Any
    ) -> None:
        place = os.fspath(as_path(directory)) if directory is not None else None
        self._run: Any = _imported("wandb").init(project=project, mode=mode, dir=place, **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is left, and end."""
        self._run.finish()


def _opened(path: PathLike) -> TextIO:
    place = Path(as_path(path))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        return open(place, "a", encoding="utf-8", newline="")
    except OSError as error:
        raise save_error(error, path) from error


def _imported(package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(f"{package} is not installed", remedy=f"pip install {package}") from error
