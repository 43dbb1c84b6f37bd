"""`torch`: what `torch.save` wrote, read without unpickling it: nothing from the file is executed.

Recognised: bare state dicts (`.pt`, `.bin`), `{"model": ..., "optimizer": ...}` and its usual spellings, Lightning's `.ckpt`. Written:
`{"state_dict": ..., "torch_ort_ckpt": ...}`, where the second part holds what a state dict can't; `bare=True` writes the state dict alone.
"""

from __future__ import annotations

import contextlib
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from ...checkpoint.backing import backed_by
from ...checkpoint.bridge import TO_ORT_MOMENTS, group_from_torch
from ...checkpoint.names import plain_name, split_aliases
from ...checkpoint.state import CheckpointState
from ...errors import CheckpointError, CorruptFileError, UnsupportedError
from ...storage.buffers import FileBuffer
from ...storage.deferred import DeferredErrors
from ...storage.files import Progress, atomic_write, warn
from ...storage.paths import PathLike
from ..legacy.ortpt import MARKS
from ..notes import describe, lost_with_weights_alone, rebuild
from ..shapes import MAX_TIES
from . import archive as torch_archive
from .objects import Opaque

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
KEY = "torch_ort_ckpt"
_MODEL_KEYS = ("state_dict", "model_state_dict", "model")
_OPTIMIZER_KEYS = ("optimizer_states", "optimizer_state_dict", "optimizer")
_PLAIN = (int, float, str)


def matches(path: Path) -> bool:
    """A zip with a `data.pkl` inside, or the older stream of pickles under one of our suffixes."""
    if not path.is_file():
        return False
    with contextlib.suppress(*torch_archive.ZIP_ERRORS):
        if zipfile.is_zipfile(path):
            with torch_archive.opened(path) as archive:
                return any(name.endswith("/data.pkl") for name in archive.namelist())
    with open(path, "rb") as file:
        return path.suffix.lower() in SUFFIXES and file.read(1) == b"\x80"


def read(path: Path, *, mmap: bool = True) -> CheckpointState:
    """Read a `torch.save` file. Optimizer state is kept where its parameters can be named."""
    buffer = FileBuffer(path, mmap=mmap)
    state = _state(torch_archive.load(buffer, checksums=not mmap), path)
    backed_by(state, [buffer])
    return state


def _state(content: Any, path: Path) -> CheckpointState:
    if not isinstance(content, Mapping):
        raise UnsupportedError(
            f"holds {content.what if isinstance(content, Opaque) else f'a {type(content).__name__}'}, not a state dict",
            path=path,
            remedy="Save the state dict of the module, or a Lightning checkpoint.",
        )
    tensors = next((content[key] for key in _MODEL_KEYS if isinstance(content.get(key), Mapping)), content)
    if not all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in tensors.items()):
        bad = next(name for name, value in tensors.items() if not (isinstance(name, str) and isinstance(value, torch.Tensor)))
        raise UnsupportedError(
            "not a state dict: this entry is not a tensor",
            path=path,
            field=str(bad),
            remedy="Save the state dict of the module, or a Lightning checkpoint.",
        )
    note = content.get(KEY)
    if tensors is not content and isinstance(note, Mapping):
        try:
            return _from_note(tensors, note, path)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptFileError(f"malformed ({type(error).__name__}: {error})", path=path, field=KEY) from error
    state = CheckpointState()
    plain = {name: plain_name(name) for name in tensors}
    if len(set(plain.values())) < len(plain):  # with and without a wrapper's prefix: two weights, not one
        plain = {name: name for name in tensors}
    for name, value in tensors.items():
        (state.trainable if value.is_floating_point() else state.frozen)[plain[name]] = value.detach()
    if tensors is not content:
        state.properties = {key: value for key, value in content.items() if isinstance(key, str) and type(value) in _PLAIN}
        _read_optimizer(state, content, path)
    return split_aliases(state)


def _from_note(tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any], path: PathLike) -> CheckpointState:
    state = rebuild(tensors, note, path)
    for name, states in dict.items(note["moments"]):
        group = state.optimizer[name]
        entries = [entry for moments in dict.values(states) for entry in dict.items(moments)]
        if group.states.keys() != states.keys() or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in entries):
            raise ValueError(f"the moments of {name!r} are not those of its parameters")
        group.states = states
    return state


def _read_optimizer(state: CheckpointState, content: Mapping[str, Any], path: PathLike) -> None:
    """PyTorch numbers an optimizer's parameters; give them their names back where that is certain."""
    found = next((content[key] for key in _OPTIMIZER_KEYS if key in content), None)
    if isinstance(found, list):
        if len(found) > 1:
            warn(f"{path}: the states of {len(found)} optimizers; only the first is kept")
        found = found[0] if found else None
    if not isinstance(found, Mapping) or "param_groups" not in found:
        return
    try:
        named = parameter_names(state, found)
        if named is None:
            warn(f"{path}: the optimizer's parameters have no names that could be found; its state is left out")
            return
        for number, group in enumerate(found["param_groups"]):
            members = {named[index]: found["state"].get(index, {}) for index in group["params"]}
            _check_moments(members)
            state.optimizer[f"group{number}"] = group_from_torch({key: group[key] for key in group if _is_plain(key, group[key])}, members)
            if lost := sorted(str(key) for key in group if not _is_plain(key, group[key])):
                warn(f"{path}: left out of optimizer group {number}, since they are not plain data: {', '.join(lost[:5])}")
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CorruptFileError(f"malformed ({type(error).__name__}: {error})", path=path, field="optimizer") from error


def _check_moments(members: Mapping[str, Mapping[Any, Any]]) -> None:
    for param, states in members.items():
        for moment, value in states.items():
            if not isinstance(moment, str) or not (value is None or isinstance(value, (torch.Tensor, int, float))):
                raise TypeError(f"{moment!r} of {param!r} is not a named tensor or number")


def _is_plain(key: Any, value: Any) -> bool:
    """A hyper-parameter: a number, text, one element of a tensor, or lists and dictionaries of them."""
    if isinstance(value, torch.Tensor):
        return isinstance(key, str) and value.numel() == 1
    if isinstance(value, dict):
        return isinstance(key, str) and all(_is_plain(name, item) and not isinstance(item, torch.Tensor) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return isinstance(key, str) and all(_is_plain(key, item) and not isinstance(item, torch.Tensor) for item in value)
    return isinstance(key, str) and (value is None or isinstance(value, (bool, int, float, str)))


def parameter_names(state: CheckpointState, found: Mapping[str, Any]) -> dict[int, str] | None:
    """From `param_names` where the file has them; else by order, if the shapes of the moments leave one way only."""
    groups = found["param_groups"]
    if all("param_names" in group for group in groups):
        return {number: plain_name(name) for group in groups for number, name in zip(group["params"], group["param_names"], strict=True)}
    numbers = [number for group in groups for number in group["params"]]
    if sorted(numbers) != list(range(len(numbers))):
        return None
    shapes = {number: _moment_shape(found["state"].get(number, {})) for number in numbers}
    buffers = ("running_mean", "running_var")
    candidates = [name for name in state.trainable if name.rsplit(".", 1)[-1] not in buffers]
    if len(candidates) != len(numbers):
        return None
    named = dict(zip(sorted(numbers), candidates, strict=True))
    fits = all(shapes[number] in (None, tuple(state.trainable[name].shape)) for number, name in named.items())
    return named if fits else None


def _moment_shape(states: Mapping[str, Any]) -> tuple[int, ...] | None:
    for key, value in states.items():
        if key in TO_ORT_MOMENTS and isinstance(value, torch.Tensor):
            return tuple(value.shape)
    return None


def write(state: CheckpointState, path: Path, *, durable: bool = True, progress: Progress | None = None, bare: bool = False) -> None:
    """Write with `torch.save`. `bare=True` writes only the state dict; a state with more in it is refused unless that was left out."""
    tensors, note = describe(state, path)
    uses: Counter[int] = Counter()
    content: dict[str, Any] = {name: _whole(value, uses) for name, value in tensors.items()}
    if bare:
        if note["strings"] or state.optimizer:
            what = "a bare state dict holds no optimizer state and no string tensors"
            raise UnsupportedError(what, path=path, remedy="Pass include_optimizer=False, or bare=False.")
        if odd := next((name for name in content if plain_name(name) != name or any(mark in name.encode() for mark in MARKS)), None):
            raise UnsupportedError(
                "a name that would be read back from a bare state dict as another one", path=path, field=odd, remedy="Rename it."
            )
        if state.nominal:
            raise UnsupportedError("a bare state dict can't say that it is nominal", path=path, remedy="Complete it first, or bare=False.")
        if lost := lost_with_weights_alone(state):
            warn(f"{path}: a bare state dict holds weights only; left out: {', '.join(lost)}")
    else:
        note["moments"] = {
            name: {param: {key: _whole(value, uses) for key, value in states.items()} for param, states in group.states.items()}
            for name, group in state.optimizer.items()
        }
        content = {"state_dict": content, KEY: note}
    with atomic_write(path, durable=durable) as file:
        output = DeferredErrors(file, progress)
        try:
            torch.save(content, cast(BinaryIO, output))
        except RuntimeError as error:
            raise CheckpointError(f"torch.save can't write it ({str(error).splitlines()[0]})", path=path) from error
        finally:
            output.check()


def _whole(value: torch.Tensor, uses: Counter[int]) -> torch.Tensor:
    """`torch.save` writes the storage behind a tensor, once: what is not exactly the tensor, or used very often, is copied first."""
    value = value.detach()
    storage = value.untyped_storage()
    if value.is_meta:
        return value
    uses[storage.data_ptr()] += 1
    if storage.nbytes() == value.numel() * value.element_size() and uses[storage.data_ptr()] % MAX_TIES:
        return value
    return value.clone(memory_format=torch.contiguous_format)
