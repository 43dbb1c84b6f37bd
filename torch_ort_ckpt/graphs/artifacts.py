"""The four training artifacts of a folder (training, eval and optimizer model, checkpoint): found, checked and described."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
import torch

from ..checkpoint.notebook import html_table
from ..checkpoint.state import CheckpointState, split_half_suffix
from ..checkpoint.state import OptimizerSpec as OptimizerSpec
from ..cuda.kernels import fallbacks
from ..errors import CheckpointError, MissingFileError
from ..formats import detect, exists, load
from ..storage.buffers import readable
from ..storage.paths import PathLike, as_path, refuse_url
from .artifact_set import current_files
from .batch_norms import shares_statistics
from .description import (
    ACCUMULATION_BUFFER,
    ACCUMULATION_OUTPUT,
    LAZY_RESET,
    TensorSpec,
    all_nodes,
    describe_ort_file,
    is_random,
    load_model,
    read_counters,
    read_order,
    spec_of,
)
from .optimizer import guess_optimizer, read_optimizer
from .passes.batch_norm_order import chain_statistics

MODELS = ("training_model", "eval_model", "optimizer_model")
CHECKPOINTS = ("checkpoint", "initial_checkpoint", "nominal_checkpoint")
"""Possible names of the checkpoint next to the models; the first one found is used."""


@dataclass(eq=False)
class Artifacts:
    """The paths and contents of the artifacts. Graphs and checkpoint are read on first access."""

    folder: Path
    training_path: Path | None = None
    eval_path: Path | None = None
    optimizer_path: Path | None = None
    checkpoint_path: Path | None = None
    prefix: str = ""
    _state: CheckpointState | None = field(default=None, repr=False)

    @classmethod
    def load(cls, folder: PathLike, *, prefix: str | None = None, checkpoint: PathLike | CheckpointState | None = None) -> Artifacts:
        """Find the artifacts in `folder`.

        `prefix` precedes `training_model.onnx`; it is detected if there is only one. `checkpoint` replaces the one in the
        folder. At least a training or an eval model must exist.
        """
        refuse_url(checkpoint)
        with readable(folder):
            return cls._find(as_path(folder), prefix, checkpoint)

    @classmethod
    def _find(cls, place: Path, prefix: str | None, checkpoint: PathLike | CheckpointState | None) -> Artifacts:
        folder = place
        if not place.is_dir():
            raise MissingFileError("no such folder", path=folder, remedy="Pass the folder that holds training_model.onnx.")
        files = current_files(place)
        if prefix is None:
            prefix = _find_prefix(place, files)
        models = {name: path for name, path in files.items() if path.is_file()}
        found = {name: models.get(f"{prefix}{name}.onnx") or models.get(f"{prefix}{name}.ort") for name in MODELS}
        if found["training_model"] is None and found["eval_model"] is None:
            raise MissingFileError(
                f"neither {prefix}training_model nor {prefix}eval_model (.onnx or .ort)",
                path=folder,
                remedy="Create them with toc.export_artifacts or onnxruntime.training.artifacts.generate_artifacts.",
            )
        state, path = (checkpoint, None) if isinstance(checkpoint, CheckpointState) else (None, checkpoint)
        if path is None and state is None:
            path = next((files[prefix + name] for name in CHECKPOINTS if prefix + name in files), None)
        elif path is not None and not exists(path):
            raise MissingFileError("no such checkpoint", path=path)
        return cls(
            folder=place,
            training_path=found["training_model"],
            eval_path=found["eval_model"],
            optimizer_path=found["optimizer_model"],
            checkpoint_path=Path(path) if path is not None else None,
            prefix=prefix,
            _state=state,
        )

    @cached_property
    def training(self) -> onnx.ModelProto | None:
        """The training graph; None where it is missing or in ORT's own format (`.ort`), which only ORT can read."""
        model = _parse(self.training_path)
        if model is not None and shares_statistics(model):
            chain_statistics(model, self.eval)
        return model

    @cached_property
    def eval(self) -> onnx.ModelProto | None:
        return _parse(self.eval_path)

    @cached_property
    def optimizer(self) -> onnx.ModelProto | None:
        return _parse(self.optimizer_path)

    @cached_property
    def state(self) -> CheckpointState:
        """The checkpoint as it was when first read."""
        if self._state is not None:
            return self._state
        if self.checkpoint_path is None:
            raise MissingFileError(
                f"no {self.prefix}checkpoint next to the models", path=self.folder, remedy="Pass Artifacts.load(..., checkpoint=path)."
            )
        return load(self.checkpoint_path)

    @cached_property
    def training_inputs(self) -> list[TensorSpec]:
        return _specs(self.training_path, self.training, "input")

    @cached_property
    def training_outputs(self) -> list[TensorSpec]:
        return _specs(self.training_path, self.training, "output")

    @cached_property
    def eval_inputs(self) -> list[TensorSpec]:
        return _specs(self.eval_path, self.eval, "input")

    @cached_property
    def eval_outputs(self) -> list[TensorSpec]:
        return _specs(self.eval_path, self.eval, "output")

    @cached_property
    def gradients(self) -> dict[str, TensorSpec]:
        """Trainable parameter -> its gradient buffer, in the graph's order. A half-precision alias's gradient belongs to its master."""
        found = {}
        for spec in self.training_inputs:
            if spec.name.endswith(ACCUMULATION_BUFFER):
                name = spec.name.removesuffix(ACCUMULATION_BUFFER)
                found[self.aliases.get(name, name)] = spec
        return found

    @cached_property
    def trainable(self) -> list[str]:
        """Parameters that the training graph computes gradients for."""
        return list(self.gradients)

    @cached_property
    def parameters(self) -> dict[str, TensorSpec]:
        """Every parameter that a graph uses, trainable or frozen; a weight used through its half-precision alias counts as its master."""
        found = {}
        for name, spec in self._parameter_inputs.items():
            master = self.aliases.get(name)
            if master is None:
                found[name] = spec
            elif master not in found:
                found[master] = self._parameter_inputs.get(master) or TensorSpec(master, torch.float32, spec.shape)
        return found

    def in_order(self, names: Iterable[str]) -> list[str]:
        """The names in PyTorch's order: that of the exported module, or else that of the graph's inputs."""
        order, _ = self._module_order
        place = {name: index for index, name in enumerate(dict.fromkeys([*order, *self.parameters]))}
        return sorted(names, key=lambda name: place.get(name, len(place)))

    @property
    def buffers(self) -> set[str]:
        """The buffers of the exported module; empty if the artifacts do not record them."""
        return set(self._module_order[1])

    @cached_property
    def counters(self) -> dict[str, int]:
        """Integer buffers (`num_batches_tracked`) that grow by so much with each training step, outside the graph."""
        return read_counters(self.training_path, self.training) if self.training_path is not None else {}

    @cached_property
    def _module_order(self) -> tuple[list[str], list[str]]:
        """All names, and those of buffers."""
        found = (read_order(path, model) for path, model in ((self.training_path, self.training), (self.eval_path, self.eval)) if path)
        return next((order for order in found if order is not None), ([], []))

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Half-precision input of a graph (`<w>_fp16`, `<w>_bf16`) -> its master `<w>`."""
        masters = set(self._graph_inputs) if self._without_checkpoint else self.state.parameters.keys()
        found = {}
        for name, spec in self._graph_inputs.items():
            master, dtype = split_half_suffix(name)
            if dtype is not None and spec.dtype == dtype and master in masters:
                found[name] = master
        return found

    @cached_property
    def inputs(self) -> list[TensorSpec]:
        """The user's inputs, in order."""
        return [spec for name, spec in self._graph_inputs.items() if name not in self._parameter_inputs]

    @cached_property
    def outputs(self) -> list[TensorSpec]:
        """The loss first, then the extra outputs."""
        specs = self.training_outputs or self.eval_outputs
        return [spec for spec in specs if not spec.name.endswith(ACCUMULATION_OUTPUT)]

    @cached_property
    def input_gradients(self) -> dict[str, str]:
        """Input -> output with the gradient of the loss with respect to it, if the graph has one (`<input>_grad`)."""
        names = {spec.name for spec in self.outputs}
        return {spec.name: f"{spec.name}_grad" for spec in self.inputs if f"{spec.name}_grad" in names}

    @property
    def loss(self) -> str:
        """The name of the loss, the first output of the training graph."""
        return self.outputs[0].name

    @cached_property
    def dimensions(self) -> list[str]:
        """The symbolic dimensions of the user's inputs, which `OrtModule(..., dimensions=...)` can fix."""
        return sorted({size for spec in self.inputs for size in (spec.shape or ()) if isinstance(size, str) and size != "?"})

    @cached_property
    def random(self) -> bool:
        """Whether a training step draws random numbers (Dropout). Unknown, and so assumed, for `.ort` models."""
        return is_random(self.training) if self.training is not None else self.training_path is not None

    @cached_property
    def optimizer_spec(self) -> OptimizerSpec:
        """What the optimizer graph does."""
        if self.optimizer_path is None:
            raise MissingFileError(f"no {self.prefix}optimizer_model", path=self.folder, remedy="Use a torch.optim optimizer.")
        if self.optimizer is None:
            return guess_optimizer(spec.name for spec in _specs(self.optimizer_path, None, "input"))
        return read_optimizer(self.optimizer, self.optimizer_path)

    @property
    def operators(self) -> list[tuple[str, str]]:
        """Domain and name of each node of the training graph (of the eval graph where there is none); empty for `.ort` models."""
        model = self.training if self.training_path is not None else self.eval
        return [(node.domain, node.op_type) for node in all_nodes(model.graph)] if model is not None else []

    def on_cuda(self) -> str:
        """Which nodes ONNX Runtime 1.19.2 runs on CUDA, in words; by the kernels it has, not by a trial."""
        if not self.operators:
            return "unknown (a .ort model)"
        names = fallbacks(self.operators)
        return f"all but {', '.join(names)}" if names else "all"

    def missing(self) -> list[str]:
        """What is missing, as text; empty if nothing is."""
        lines = []
        for path, name, use in (
            (self.training_path, "training_model.onnx", "training"),
            (self.eval_path, "eval_model.onnx", "eval() and no_grad()"),
            (self.optimizer_path, "optimizer_model.onnx", "OrtOptimizer"),
        ):
            if path is None:
                lines.append(f"{self.prefix}{name} (needed for {use})")
        if self.checkpoint_path is None and self._state is None:
            lines.append(f"{self.prefix}checkpoint (the parameters' values)")
        elif self.state.nominal:
            lines.append("parameter values (the checkpoint is nominal: complete it from a state dict or a buffer)")
        return lines

    def describe(self) -> str:
        """A human-readable summary of the artifacts."""
        lines = [f"artifacts in {self.folder}"]
        lines += [f"  input      {spec}" for spec in self.inputs]
        lines += [f"  {'loss  ' if index == 0 else 'output'}     {spec}" for index, spec in enumerate(self.outputs)]
        trainable = set(self.trainable)
        lines += [f"  {'trainable ' if name in trainable else 'frozen    '} {spec}" for name, spec in self.parameters.items()]
        lines += [f"  alias      {alias} of {master}" for alias, master in self.aliases.items()]
        if self.dimensions:
            lines.append(f"  symbolic dimensions: {', '.join(self.dimensions)}")
        if self.optimizer is not None:
            lines.append(f"  optimizer  {self.optimizer_spec}")
        lines.append(f"  runs on CUDA (engine ort): {self.on_cuda()}")
        if self.checkpoint_path is not None:
            lines.append(f"  checkpoint {self.checkpoint_path.name} ({detect(self.checkpoint_path)})")
        lines += [f"  missing    {line}" for line in self.missing()]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """What `describe` says, as plain data."""
        spec = self.optimizer_spec if self.optimizer is not None else None
        return {
            "inputs": [str(item) for item in self.inputs],
            "outputs": [str(item) for item in self.outputs],
            "trainable": self.trainable,
            "dimensions": list(self.dimensions),
            "optimizer": None if spec is None else {"kind": spec.kind, **spec.hyperparameters, **spec.beyond_torch},
            "on_cuda": self.on_cuda(),
            "missing": self.missing(),
        }

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        trainable, optimizer = set(self.trainable), self.optimizer_spec if self.optimizer_path is not None else None
        rows = [("input", spec.name, spec) for spec in self.inputs]
        rows += [("loss" if index == 0 else "output", spec.name, spec) for index, spec in enumerate(self.outputs)]
        rows += [("trained" if name in trainable else "frozen", name, spec) for name, spec in self.parameters.items()]
        cells = [(role, name, str(spec.dtype).removeprefix("torch."), list(spec.shape or ())) for role, name, spec in rows]
        title = f"Artifacts in {self.folder.name}" + (f", optimizer {optimizer.kind}" if optimizer is not None else "")
        return html_table(title, ("what", "name", "type", "shape"), cells)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle what was read so far, without the mapped checkpoint: the files need not exist where it is unpickled."""
        for name in (
            "training",
            "eval",
            "optimizer",
            "inputs",
            "outputs",
            "parameters",
            "gradients",
            "random",
            "eval_outputs",
            "_module_order",
            "counters",
        ):
            getattr(self, name)
        return {key: value for key, value in self.__dict__.items() if key not in ("state", "_state")} | {"_state": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Artifacts:
        return self  # never changed after loading

    @property
    def _without_checkpoint(self) -> bool:
        return self.checkpoint_path is None and self._state is None

    @cached_property
    def _graph_inputs(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in [*self.training_inputs, *self.eval_inputs] if not _is_machinery(spec.name)}

    @cached_property
    def _parameter_inputs(self) -> dict[str, TensorSpec]:
        """Inputs of the graphs that are parameters or aliases. With no checkpoint, those from the first trainable on (ORT's order)."""
        specs = self._graph_inputs
        trained = {spec.name.removesuffix(ACCUMULATION_BUFFER) for spec in self.training_inputs if spec.name.endswith(ACCUMULATION_BUFFER)}
        if self._without_checkpoint:
            names = list(specs)
            first = min((names.index(name) for name in names if name in trained), default=len(names))
            return {name: specs[name] for name in names[first:]}
        known = self.state.parameters.keys()
        if unknown := sorted(name for name in trained if name not in known and name not in self.aliases):
            raise CheckpointError(
                f"has no {', '.join(unknown[:5])}, which the training graph trains",
                path=self.checkpoint_path,
                remedy="It belongs to other artifacts: pass the right one as Artifacts.load(..., checkpoint=path).",
            )
        return {name: spec for name, spec in specs.items() if name in known or name in self.aliases}


def _is_machinery(name: str) -> bool:
    return name.endswith(ACCUMULATION_BUFFER) or name == LAZY_RESET


def _find_prefix(folder: Path, files: Iterable[str]) -> str:
    endings = [name + suffix for name in MODELS[:2] for suffix in (".onnx", ".ort")]
    prefixes = {name.removesuffix(ending) for name in files for ending in endings if name.endswith(ending)}
    if "" in prefixes or not prefixes:
        return ""
    if len(prefixes) > 1:
        names = ", ".join(repr(prefix) for prefix in sorted(prefixes))
        raise CheckpointError(f"several sets of artifacts, with prefixes {names}", path=folder, remedy="Pass prefix=.")
    return prefixes.pop()


def _parse(path: Path | None) -> onnx.ModelProto | None:
    return load_model(path, weights=True) if path is not None and path.suffix.lower() == ".onnx" else None


def _specs(path: Path | None, model: onnx.ModelProto | None, side: str) -> list[TensorSpec]:
    if path is None:
        return []
    if model is not None:
        constants = {tensor.name for tensor in model.graph.initializer}
        return [spec_of(value) for value in getattr(model.graph, side) if value.name not in constants]
    return describe_ort_file(path, side)
