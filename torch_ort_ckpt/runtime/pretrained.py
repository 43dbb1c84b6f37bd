"""A module as a folder, as Hugging Face's libraries lay it out: `model.safetensors`, `config.json`, and the graphs beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from ..checkpoint.state import CheckpointState
from ..errors import CheckpointError, CorruptFileError, MissingFileError
from ..formats import load, save
from ..graphs.artifact_set import current_files, pending_set
from ..graphs.artifacts import MODELS, Artifacts
from ..graphs.description import load_model
from ..storage.buffers import readable
from ..storage.paths import PathLike, as_path

WEIGHTS, CONFIG, KEY = "model.safetensors", "config.json", "torch_ort_ckpt"
VERSION = 1


def save_folder(folder: PathLike, artifacts: Artifacts, state: CheckpointState, dimensions: Mapping[str, int], *, overwrite: bool) -> None:
    """Write the weights, the graphs and what builds the module again; all files appear at once."""
    place = as_path(folder)
    paths = dict(zip(MODELS, (artifacts.training_path, artifacts.eval_path, artifacts.optimizer_path), strict=True))
    graphs = {name: path for name, path in paths.items() if path is not None}
    if state.nominal:
        raise CheckpointError("the parameters have no values yet", path=place, remedy="Call model.load_state_dict(...) first.")
    with pending_set(place, _owns, overwrite=overwrite) as pending:
        for name, path in graphs.items():
            _copy_graph(path, pending.path / (name + path.suffix))
        save(state, pending.path / WEIGHTS, format="safetensors")
        content = {
            "architectures": ["OrtModule"],
            "model_type": "ort_module",
            KEY: {
                "version": VERSION,
                "inputs": [str(spec) for spec in artifacts.inputs],
                "trainable": list(state.trainable),
                "dimensions": dict(dimensions),
            },
        }
        (pending.path / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        pending.commit([CONFIG, WEIGHTS, *(name + path.suffix for name, path in graphs.items())])


def load_folder(folder: PathLike) -> tuple[Artifacts, dict[str, int]]:
    """The artifacts that `save_folder` wrote, with their weights, and the dimensions that were fixed."""
    place = as_path(folder)
    with readable(folder):
        files = current_files(place)
        if CONFIG not in files or WEIGHTS not in files:
            missing = " and ".join(name for name in (CONFIG, WEIGHTS) if name not in files)
            raise MissingFileError(f"no {missing}", path=place, remedy="Pass a folder that OrtModule.save_pretrained wrote.")
        saved = _read(files[CONFIG])
        state = load(files[WEIGHTS])
    values = state.parameters
    # A trainer may have written the weights anew, without our note of which are trained.
    state.trainable = {name: value for name, value in values.items() if name in saved["trainable"]}
    state.frozen = {name: value for name, value in values.items() if name not in saved["trainable"]}
    artifacts = Artifacts.load(place, prefix="", checkpoint=_whole(state, saved, files[WEIGHTS]))
    return artifacts, saved["dimensions"]


def _owns(name: str) -> bool:
    return name in (WEIGHTS, CONFIG) or Path(name).stem in MODELS


def _copy_graph(source: Path, target: Path) -> None:
    if source.suffix == ".onnx":
        onnx.save(load_model(source, weights=True), target)  # with what it may have in files beside it
    else:
        shutil.copyfile(source, target)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        saved: dict[str, Any] = content[KEY]
        sound = (
            isinstance(saved["trainable"], list)
            and all(isinstance(name, str) for name in saved["trainable"])
            and isinstance(saved["dimensions"], dict)
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptFileError(
            "does not describe an OrtModule", path=path, field=KEY, remedy="Pass a folder that OrtModule.save_pretrained wrote."
        ) from error
    if not sound or saved.get("version") != VERSION:
        raise CorruptFileError("is of another version, or damaged", path=path, field=KEY, remedy="Save it again with this release.")
    return saved


def _whole(state: CheckpointState, saved: dict[str, Any], path: Path) -> CheckpointState:
    if missing := [name for name in saved["trainable"] if name not in state.trainable]:
        raise CheckpointError(
            f"lacks {', '.join(missing[:5])}, which the model trains", path=path, remedy="It belongs to another model, or is incomplete."
        )
    return state
