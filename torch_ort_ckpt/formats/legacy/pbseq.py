"""`pbseq`: the folder of protobuf sequences that on-device training of ORT 1.13 to 1.15 wrote.

`paramtrain_tensors.pbseq`, `paramfrozen_tensors.pbseq`, `optim_<group>_<moment>_tensors.pbseq` (tensors named after their parameter),
`optim_<group>_properties.pbseq`, `custom_properties.pbseq`; each is absent when it would be empty.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...checkpoint.backing import backed_by
from ...checkpoint.names import joined_aliases
from ...checkpoint.state import CheckpointState, OptimizerGroup, Value, is_string
from ...errors import CheckpointError, CorruptFileError, UnsupportedError
from ...storage.buffers import FileBuffer
from ...storage.files import Progress
from ...storage.folders import atomic_folder
from ...storage.folders import repair as repair
from ..onnx import protobuf
from ..ort import extras, readers
from ..ort.groups import prepare
from ..soundness import is_unicode

SUFFIXES = (".pbseq",)
READ_BY = "ORT 1.13 to 1.15 (1.14 ignores the saved moments)"

_TRAINABLE, _FROZEN, _CUSTOM = "paramtrain_tensors.pbseq", "paramfrozen_tensors.pbseq", "custom_properties.pbseq"
_GROUP, _TENSORS, _PROPERTIES = "optim_", "_tensors.pbseq", "_properties.pbseq"
_STEP, _RATE = "builtin.step", "builtin.initial_learning_rate"
_STATELESS = extras.PREFIX + "stateless"
"""Parameters without moments (JSON, group -> names): files per moment have no place for them."""


def matches(path: Path) -> bool:
    try:
        return path.is_dir() and any(_owns(name) for name in os.listdir(path))
    except OSError:
        return False


def read(path: Path, *, mmap: bool = True) -> CheckpointState:
    """Read the files of a folder."""
    state = _as_written(path, mmap)
    _restore_stateless(state, path)
    return extras.unpack(state, path)


def read_by(path: Path) -> str:
    """The releases of ORT that read this folder, and why not others."""
    return readers.read_by(_as_written(path, mmap=True), READ_BY, readers.REFUSED_BY_PBSEQ)


def _as_written(path: Path, mmap: bool) -> CheckpointState:
    """With aliases among the weights and groups as ORT sees them."""
    try:
        names = sorted(name for name in os.listdir(path) if _owns(name))
    except OSError as error:
        raise CheckpointError(f"can't be listed ({error.strerror})", path=path) from error
    source = _Source(path, mmap)
    state = CheckpointState()
    if _TRAINABLE in names:
        state.trainable = source.tensors(_TRAINABLE)
    if _FROZEN in names:
        state.frozen = source.tensors(_FROZEN)
    if both := state.trainable.keys() & state.frozen.keys():
        raise CorruptFileError("both trainable and frozen", path=path, field=min(both))
    groups = [name[len(_GROUP) : -len(_PROPERTIES)] for name in names if name.startswith(_GROUP) and name.endswith(_PROPERTIES)]
    for group in groups:
        state.optimizer[group] = _group(source.scalars(f"{_GROUP}{group}{_PROPERTIES}"))
    for name in names:
        if name.startswith(_GROUP) and name.endswith(_TENSORS):
            group, moment = _split_name(name, groups)
            for param, value in source.tensors(name).items():
                state.optimizer.setdefault(group, OptimizerGroup()).states.setdefault(param, {})[moment] = value
    if _CUSTOM in names:
        state.properties = source.scalars(_CUSTOM)
    backed_by(state, source.buffers)
    return state


def write(state: CheckpointState, path: Path, *, durable: bool = True, progress: Progress | None = None, groups: str = "single") -> None:
    """Write a folder that ORT 1.13 to 1.15 reads. `groups` says what to do with several optimizer groups, as in format `ort`."""
    if state.nominal:
        raise UnsupportedError("this format has no nominal checkpoints", path=path, remedy="Complete the state first.")
    if both := state.trainable.keys() & state.frozen.keys():
        raise UnsupportedError("both trainable and frozen", path=path, field=min(both))
    state, notes = prepare(state, path, groups)
    files: dict[str, list[tuple[bytes, Any]]] = {}
    frozen = {**state.frozen, **joined_aliases(state)}
    for name, values in ((_TRAINABLE, state.trainable), (_FROZEN, frozen)):
        if values:
            files[name] = _encoded(values, path, name.partition("_")[0])
    for group_name, group in state.optimizer.items():
        files[_file_name(f"{_GROUP}{group_name}{_PROPERTIES}", path)] = [
            protobuf.encode_scalar(_STEP, group.step, path),
            protobuf.encode_scalar(_RATE, float(group.initial_lr), path),
        ]
        moments: dict[str, dict[str, Value]] = {}
        for param, states in group.states.items():
            for moment, value in states.items():
                moments.setdefault(moment, {})[param] = value
        for moment, values in moments.items():
            name = _file_name(f"{_GROUP}{group_name}_{moment}{_TENSORS}", path)
            if name in files or _split_name(name, state.optimizer) != (group_name, moment):
                raise UnsupportedError(
                    "its file name would be read back as another group's",
                    path=path,
                    field=f"optimizer/{group_name}/{moment}",
                    remedy="Rename it.",
                )
            files[name] = _encoded(values, path, f"optimizer/{group_name}")
    if properties := _properties(state, path, notes):
        files[_CUSTOM] = [protobuf.encode_scalar(name, value, path) for name, value in sorted(properties.items())]
    if not files:
        files[_TRAINABLE] = []  # an empty folder would not be a checkpoint
    with atomic_folder(path, _owns, durable=durable) as folder:
        for name, messages in files.items():
            protobuf.write_sequence(folder.open(name), messages, progress)


class _Source:
    """Opens the files of one folder, keeping the buffers that tensors alias."""

    def __init__(self, path: Path, mmap: bool) -> None:
        self.path, self.mmap = path, mmap
        self.buffers: list[FileBuffer] = []

    def tensors(self, name: str) -> dict[str, Value]:
        buffer = FileBuffer(self.path / name, mmap=self.mmap)
        self.buffers.append(buffer)
        result: dict[str, Value] = {}
        for message in protobuf.sequence(buffer):
            tensor, value = protobuf.tensor(message)
            if tensor in result:
                raise message.error(f"{tensor!r} occurs twice")
            result[tensor] = value
        return result

    def scalars(self, name: str) -> dict[str, int | float | str]:
        result: dict[str, int | float | str] = {}
        for key, value in self.tensors(name).items():
            number = value.reshape(-1).tolist()
            if len(number) != 1 or not isinstance(number[0], (int, float, str)):
                raise CorruptFileError("a property must be one number or one string", path=self.path / name, field=key)
            result[key] = int(number[0]) if isinstance(number[0], bool) else number[0]
        return result


def _group(properties: dict[str, int | float | str]) -> OptimizerGroup:
    group = OptimizerGroup()
    step, rate = properties.pop(_STEP, None), properties.pop(_RATE, None)
    if isinstance(step, int):
        group.step = step
    if isinstance(rate, float):
        group.initial_lr = rate
    group.hyperparameters.update(properties)  # not written by ORT, but nothing is lost
    return group


def _split_name(name: str, groups: Iterable[str]) -> tuple[str, str]:
    """Group and moment of `optim_<group>_<moment>_tensors.pbseq`; either may have underscores, so known groups go first."""
    middle = name[len(_GROUP) : -len(_TENSORS)]
    known = [group for group in groups if middle.startswith(f"{group}_")]
    if known:
        group = max(known, key=len)
        return group, middle[len(group) + 1 :]
    group, _, moment = middle.rpartition("_")
    return group, moment


def _encoded(values: Mapping[str, Value], path: Path, where: str) -> list[tuple[bytes, Any]]:
    for name, value in values.items():
        if not is_string(value) and value.dtype.is_complex:
            raise UnsupportedError("ORT has no complex tensors", path=path, field=f"{where}/{name}", remedy="Convert it first.")
    return [protobuf.encode_tensor(name, value, path, where) for name, value in sorted(values.items(), key=_byte_order)]


def _byte_order(item: tuple[str, Value]) -> bytes:
    return item[0].encode("utf-8", "surrogatepass")


def _properties(state: CheckpointState, path: Path, notes: Mapping[str, dict[str, Any]]) -> dict[str, int | float | str]:
    properties = extras.pack(state, path, notes)
    stateless = {name: sorted(param for param, states in group.states.items() if not states) for name, group in state.optimizer.items()}
    if stateless := {name: params for name, params in stateless.items() if params}:
        properties[_STATELESS] = json.dumps(stateless, sort_keys=True)
    return properties


def _restore_stateless(state: CheckpointState, path: Path) -> None:
    text = state.properties.pop(_STATELESS, None)
    if text is None:
        return
    try:
        for group, params in json.loads(str(text)).items():
            for param in params:
                state.optimizer[group].states.setdefault(str(param), {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"malformed ({error})", path=path / _CUSTOM, field=_STATELESS) from error


def _file_name(name: str, path: Path) -> str:
    if "/" in name or "\\" in name or "\0" in name or not is_unicode(name):
        raise UnsupportedError("a group or moment name that can't be part of a file name", path=path, field=repr(name), remedy="Rename it.")
    return name


def _owns(name: str) -> bool:
    if name in (_TRAINABLE, _FROZEN, _CUSTOM):
        return True
    return name.startswith(_GROUP) and name.endswith((_TENSORS, _PROPERTIES))
