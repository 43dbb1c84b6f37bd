"""Writing a set of training artifacts: three models and a checkpoint, all of them or none."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch

from ..checkpoint.state import CheckpointState, OptimizerSpec
from ..formats import save
from .artifact_set import pending_set, refuse_existing
from .artifacts import MODELS, Artifacts
from .description import standard_opset
from .gradients.clients import Client
from .optimizer import optimizer_model

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Made:
    """What a builder returns: the models, which parameters are trained, and the values of everything that the checkpoint holds."""

    training: onnx.ModelProto
    evaluation: onnx.ModelProto | None
    trainable: list[str]
    states: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Target:
    """Where the artifacts go and who will read them."""

    folder: Path
    client: Client
    prefix: str = ""
    nominal: bool = False
    overwrite: bool = False

    def refuse_existing(self) -> None:
        refuse_existing(self.folder, self._owns, self.overwrite)

    @property
    def _owns(self) -> Callable[[str], bool]:
        return functools.partial(_is_artifact, self.prefix)

    def write(self, made: Made, spec: OptimizerSpec | None, state: CheckpointState) -> Artifacts:
        prefix = self.prefix
        models = {f"{prefix}training_model.onnx": made.training}
        if made.evaluation is not None:
            models[f"{prefix}eval_model.onnx"] = made.evaluation
        if spec is not None:
            models[f"{prefix}optimizer_model.onnx"] = optimizer_model(spec, opset=standard_opset(made.training))
        with pending_set(self.folder, self._owns, overwrite=self.overwrite) as pending:
            for name, graph in models.items():
                self.client.adapt(graph)
                onnx.save(graph, pending.path / name)
            names = list(models)
            checkpoints = {f"{prefix}checkpoint": state} | ({f"{prefix}nominal_checkpoint": _nominal(state)} if self.nominal else {})
            for name, content in checkpoints.items():
                save(content, pending.path / name, format="ort", version=self.client.checkpoint_version)
                names += [part for part in (name, f"{name}.data") if (pending.path / part).exists()]
            pending.commit(names)
        return Artifacts.load(self.folder, prefix=prefix)


def _is_artifact(prefix: str, name: str) -> bool:
    """Whether a file of this name belongs to the set of artifacts with this prefix."""
    names = {f"{prefix}{model}{suffix}" for model in MODELS for suffix in (".onnx", ".ort")}
    names |= {f"{prefix}{checkpoint}{suffix}" for checkpoint in ("checkpoint", "nominal_checkpoint") for suffix in ("", ".data")}
    return name in names


def _nominal(state: CheckpointState) -> CheckpointState:
    def empty(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: torch.empty((), dtype=value.dtype, device="meta") for name, value in values.items()}

    return CheckpointState(trainable=empty(state.trainable), frozen=empty(state.frozen), nominal=True, format_version=state.format_version)


def tell_terminal(text: str) -> None:
    """Stages take seconds each: a line for each where somebody looks on, the log elsewhere."""
    _log.info("%s", text)
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"export: {text}\n")
        sys.stderr.flush()
