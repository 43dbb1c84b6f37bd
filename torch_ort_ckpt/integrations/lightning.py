"""Lightning: its checkpoints as ORT checkpoints (`OrtCheckpointIO`), or such beside its own (the callback `OrtCheckpoint`).

Both exist for `lightning` and for `pytorch_lightning` (2.0 and later), which are two packages with classes of their own. The names of
this module belong to the one that is imported already, else to `lightning`; `classes("pytorch_lightning")` gives those of the other.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..checkpoint.bridge import from_torch, group_from_torch
from ..checkpoint.state import CheckpointState
from ..checkpoint.training_graph import GraphOptimizer, TrainingGraph, only_graph
from ..errors import CheckpointError, CorruptFileError, MissingDependencyError, MissingFileError, UnsupportedError
from ..formats import save
from ..formats.safetensors.checkpoint import files
from ..formats.torch.checkpoint import parameter_names
from ..storage.buffers import readable
from ..storage.files import warn
from ..storage.paths import as_path, refuse_url
from ..training import tree
from ..training.directory import pending_checkpoint, recover, remove
from ..training.entry import MANIFEST, SHARED, read_entry, write_manifest, write_state, write_tree

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
KEY = "torch_ort_ckpt"
SUFFIXES = {"ort": ".ortckpt", "safetensors": ".safetensors"}


@functools.cache
def classes(package: str) -> tuple[type, type]:
    """(`OrtCheckpointIO`, `OrtCheckpoint`) for "lightning" or "pytorch_lightning"."""
    if package not in PACKAGES:
        raise CheckpointError(f"no such package: {package!r}", remedy=f"Use one of {', '.join(PACKAGES)}.")
    try:
        pl: Any = importlib.import_module(PACKAGES[package])
        plugins: Any = importlib.import_module(f"{PACKAGES[package]}.plugins.io")
    except ImportError as error:
        raise MissingDependencyError(f"{package} is not installed", remedy='pip install "torch-ort-ckpt[lightning]"') from error
    _teach_load_from_checkpoint(importlib.import_module(f"{PACKAGES[package]}.core.saving"))
    return _checkpoint_io(plugins), _callback(pl)


def _teach_load_from_checkpoint(saving: Any) -> None:
    """`LightningModule.load_from_checkpoint` opens the path itself, without the plugin: let it read our folders too."""
    theirs: Any = saving.pl_load

    @functools.wraps(theirs)
    def pl_load(path: Any, map_location: Any = None, **options: Any) -> Any:
        ours = isinstance(path, (str, os.PathLike)) and os.path.isfile(os.path.join(path, MANIFEST))
        return read_lightning(Path(path), map_location) if ours else theirs(path, map_location=map_location, **options)

    saving.pl_load = pl_load


def _checkpoint_io(plugins: Any) -> type:
    class OrtCheckpointIO(plugins.CheckpointIO):  # type: ignore[misc]  # the base is chosen at run time
        """`Trainer(plugins=[OrtCheckpointIO()])`: every checkpoint becomes a folder with an ORT checkpoint inside and, beside it, what
        Lightning needs, without pickles. Reads such folders and Lightning's own files. Works inside `AsyncCheckpointIO`."""

        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            if storage_options is not None:
                raise CheckpointError("storage_options are not supported", path=path)
            refuse_url(path)
            write_lightning(checkpoint, Path(path))

        def load_checkpoint(self, path: Any, map_location: Any = None, **options: Any) -> dict[str, Any]:
            place = as_path(path)
            if not os.path.lexists(place):
                recover(place)
            if place.is_dir():
                return read_lightning(place, map_location)
            return _load_file(place, map_location, options.get("weights_only") is not False)

        def remove_checkpoint(self, path: Any) -> None:
            refuse_url(path)
            _remove(Path(path))

    return OrtCheckpointIO


def _load_file(path: Path, map_location: Any, weights_only: bool) -> dict[str, Any]:
    """Lightning's own file. Before 2.6 Lightning unpickled it whatever it held; here only with its `weights_only=False`."""
    if not path.exists():
        raise MissingFileError("no such file", path=path)
    try:
        with readable(path):
            found: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise UnsupportedError(
            "holds Python objects that only unsafe unpickling could read",
            path=path,
            remedy="If you trust the file, pass weights_only=False to the Trainer's fit, validate or test.",
        ) from error
    except (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"torch.load can't read it ({type(error).__name__})", path=path) from error
    return found


def _callback(pl: Any) -> type:
    base: Any = pl.callbacks.ModelCheckpoint

    class OrtCheckpoint(base):  # type: ignore[misc]  # the base is chosen at run time
        """`ModelCheckpoint` (all its arguments) that writes ORT checkpoints, or safetensors with `format="safetensors"`: weights and
        moments for ORT, converters and devices. Beside a `ModelCheckpoint`, or instead of it.

        An `OrtModule` inside the LightningModule is written under its own names, ready for its artifacts; `module` names another part.
        """

        def __init__(self, *args: Any, format: str = "ort", module: str | None = None, **options: Any) -> None:
            if format not in SUFFIXES:
                raise CheckpointError(f"{format!r} is not one of {', '.join(SUFFIXES)}", field="format")
            refuse_url(args[0] if args else options.get("dirpath"), "dirpath")
            self.format, self.module = format, module
            self.FILE_EXTENSION = SUFFIXES[format]
            super().__init__(*args, **options)

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            super().setup(trainer, pl_module, stage)
            refuse_url(self.dirpath, "dirpath")  # it may come from the Trainer

        @property
        def state_key(self) -> str:
            return f"{super().state_key}[format={self.format}, module={self.module}]"

        def on_save_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: dict[str, Any]) -> None:
            """Passes to `OrtCheckpointIO` what Lightning's dictionary lacks: trainable weights, and the parameters of the moments."""
            named = {id(parameter): name for name, parameter in pl_module.named_parameters()}
            groups = [group for optimizer in trainer.optimizers[:1] for group in optimizer.param_groups]
            checkpoint[KEY] = {
                "trainable": [name for name, parameter in pl_module.named_parameters() if parameter.requires_grad],
                "optimizer": [named.get(id(parameter), "") for group in groups for parameter in group["params"]],
            }

        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            refuse_url(filepath)
            if trainer.is_global_zero:
                Path(filepath).parent.mkdir(parents=True, exist_ok=True)
                state = training_state(trainer, self.module, include_optimizer=not self.save_weights_only)
                options: dict[str, Any] = {"groups": "keep"} if self.format == "ort" and len(state.optimizer) > 1 else {}
                save(state, filepath, format=self.format, **options)
            trainer.strategy.barrier("OrtCheckpoint")
            self._last_global_step_saved = trainer.global_step
            self._last_checkpoint_saved = filepath

        def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
            if trainer.is_global_zero:
                place = Path(filepath)
                beside = [place.with_name(place.name + ".data")] if self.format == "ort" else files(place)
                for part in (place, *beside):
                    _remove(part)

    return OrtCheckpoint


def training_state(trainer: Any, part: str | None = None, *, include_optimizer: bool = True) -> CheckpointState:
    """The state of a Trainer's module (or the `part` of it) and its optimizer, tensors as they are."""
    root: nn.Module = trainer.lightning_module
    chosen = root.get_submodule(part) if part is not None else only_graph(root) or root
    optimizer = trainer.optimizers[0] if include_optimizer and trainer.optimizers else None
    properties: dict[str, int | float | str] = {"epoch": trainer.current_epoch, "global_step": trainer.global_step}
    if isinstance(chosen, TrainingGraph):
        inner = _unwrapped(optimizer)
        if inner is None or isinstance(inner, GraphOptimizer):
            return chosen.checkpoint(inner, properties=properties)
    held = {id(parameter) for parameter in chosen.parameters()}
    whole = optimizer is not None and all(id(p) in held for group in optimizer.param_groups for p in group["params"])
    return from_torch(chosen, optimizer if whole else None, properties=properties)


def write_lightning(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write one of Lightning's checkpoint dictionaries as a folder, atomically."""
    state = _state_of(checkpoint, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path)
    with pending_checkpoint(path, asked=True) as pending:
        files = write_state(pending.path, state, durable=True)
        files |= write_tree(pending.path, SHARED, *tree.encode(dict(checkpoint), tree.labels(state)), durable=True)
        write_manifest(pending.path, int(checkpoint.get("global_step", 0)), 1, {}, files, durable=True)
        pending.commit(durable=True)


def read_lightning(path: Path, map_location: Any = None) -> dict[str, Any]:
    """The dictionary that `write_lightning` stored, after checking every byte."""
    if not (path / MANIFEST).exists():
        raise CheckpointError("not a Lightning checkpoint of this library", path=path, remedy="It has no manifest.json.")
    entry = read_entry(path)
    entry.verify()
    content: dict[str, Any] = entry.shared(entry.state().clone())
    if isinstance(map_location, (str, torch.device)):
        content = _moved(content, map_location)
    return content


def _moved(content: Any, device: str | torch.device) -> Any:
    """Plain data with its tensors on the device."""
    if isinstance(content, torch.Tensor):
        return content.to(device)
    if type(content) is dict:
        return {key: _moved(value, device) for key, value in content.items()}
    if type(content) in (list, tuple):
        return type(content)(_moved(value, device) for value in content)
    return content


def _state_of(checkpoint: Mapping[str, Any], path: Path) -> CheckpointState:
    """Weights, and moments where the optimizer's parameters can be named; both stay in Lightning's dictionary as references."""
    state = CheckpointState(properties={key: int(checkpoint[key]) for key in ("epoch", "global_step") if key in checkpoint})
    known = checkpoint.get(KEY, {})
    for name, value in _weights(checkpoint).items():
        if isinstance(value, torch.Tensor):
            learnt = name in known["trainable"] if known else value.is_floating_point()
            (state.trainable if learnt else state.frozen)[name] = value.detach()
    optimizers = checkpoint.get("optimizer_states") or [value for value in checkpoint.values() if _is_optimizer(value)]
    if len(optimizers) == 1 and optimizers[0].get("param_groups"):
        named = dict(enumerate(known["optimizer"])) if known else parameter_names(state, optimizers[0]) or {}
        told = bool(named) and all(name in state.trainable for name in named.values())
        for number, group in enumerate(optimizers[0]["param_groups"] if told else ()):
            members = {named[index]: optimizers[0]["state"].get(index, {}) for index in group["params"]}
            state.optimizer[f"group{number}"] = group_from_torch(group, members)
    return state


def _weights(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The Trainer's `state_dict`; of Fabric, which leaves the names to the user, every dictionary of tensors (several: with their keys)."""
    if "state_dict" in checkpoint:
        found: Mapping[str, Any] = checkpoint["state_dict"]
        return found
    modules = {key: value for key, value in checkpoint.items() if _is_state_dict(value)}
    if len(modules) == 1:
        return next(iter(modules.values()))
    return {f"{key}.{name}": value for key, weights in modules.items() for name, value in weights.items()}


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(item, torch.Tensor) for item in value.values())


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside Lightning's own wrapper."""
    modules = [sys.modules.get(f"{package}.core.optimizer") for package in PACKAGES.values()]
    kinds = tuple(module.LightningOptimizer for module in modules if module is not None)
    return optimizer.optimizer if isinstance(optimizer, kinds) else optimizer


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        if (reason := remove(path)) is not None:
            warn(f"{path} is kept: {reason}")
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def __getattr__(name: str) -> Any:
    if name in ("OrtCheckpointIO", "OrtCheckpoint"):
        return classes(_package())[("OrtCheckpointIO", "OrtCheckpoint").index(name)]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _package() -> str:
    loaded: dict[str, ModuleType] = sys.modules
    imported = [package for package, module in PACKAGES.items() if module in loaded]
    installed = [package for package in PACKAGES if importlib.util.find_spec(package)]
    for package in (*imported, *installed):
        return package
    raise MissingDependencyError("neither lightning nor pytorch_lightning is installed", remedy='pip install "torch-ort-ckpt[lightning]"')
