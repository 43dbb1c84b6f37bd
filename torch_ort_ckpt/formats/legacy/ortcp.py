"""`ortcp`: the HDF5 file of `ORTTrainer.save_checkpoint` (ORT 1.7 to 1.14), one per rank.

`model/full_precision/<w>` (and `model/mixed_precision/<w>`), `optimizer/<w>/{Moment_1, Moment_2, Update_Count}`, Lamb's
`optimizer/shared_optimizer_state/Step`, `trainer_options`, `train_step_info`, `partition_info/<w>` and `user_dict`, the hex of a pickle.
A `/` in a weight's name nests groups.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...checkpoint import properties as names
from ...checkpoint.backing import backed_by
from ...checkpoint.names import same_aliases
from ...checkpoint.state import CheckpointState, OptimizerGroup, PartitionInfo, Value, is_string, nbytes, split_half_suffix
from ...errors import CorruptFileError, UnsupportedError
from ...storage.buffers import FileBuffer
from ...storage.deferred import DeferredErrors
from ...storage.files import Progress, atomic_write
from ..soundness import is_unicode
from . import moments
from .hdf5 import SIGNATURE, Tree, read_tree

SUFFIXES = (".ortcp",)
READ_BY = "ORTTrainer of ORT 1.7 to 1.14 (its code was shipped to 1.16)"

_SHARED = "shared_optimizer_state"
_RANK_OPTIONS = (names.WORLD_RANK, names.WORLD_SIZE, names.DATA_PARALLEL_SIZE, names.HORIZONTAL_PARALLEL_SIZE, names.ZERO_STAGE)
_ALONE = {names.WORLD_RANK: 0, names.WORLD_SIZE: 1, names.DATA_PARALLEL_SIZE: 1, names.HORIZONTAL_PARALLEL_SIZE: 1, names.ZERO_STAGE: 0}
_STEPS = {"step": names.STEP, "optimization_step": names.WEIGHT_UPDATE_STEP}


def matches(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(8) == SIGNATURE
    except OSError:
        return False


def read(path: Path, *, mmap: bool = True, unsafe_user_dict: bool = False) -> CheckpointState:
    """Read one file.

    `unsafe_user_dict=True` unpickles the user dict, which runs whatever code its writer put there: only for files you trust. The
    property `user_dict` is then the object itself; otherwise it is the hex text from the file.
    """
    buffer = FileBuffer(path, mmap=mmap)
    tree = read_tree(buffer)
    note = tree.pop(moments.NOTE, None)
    state = moments.restore(_from_tree(tree, path), None if note is None else _text(note, path, moments.NOTE), path)
    backed_by(state, [buffer])
    if unsafe_user_dict and names.USER_DICT in state.properties:
        state.properties[names.USER_DICT] = _unpickled(str(state.properties[names.USER_DICT]), path)
    return state


def write(state: CheckpointState, path: Path, *, durable: bool = True, progress: Progress | None = None) -> None:
    """Write one file as ORT's `_checkpoint_storage` laid it out."""
    from .hdf5_library import h5py_module

    moments.check_plain(state, path)
    h5py = h5py_module(path)
    user: Any = state.properties.get(names.USER_DICT)
    if isinstance(user, dict):  # as `unsafe_user_dict` left it
        state = dataclasses.replace(state, properties={**state.properties, names.USER_DICT: pickle.dumps(user).hex()})
    tree = _to_tree(state, path)
    inferred = _from_tree(tree, path)
    _check_names(inferred, state, path)
    if (note := moments.note(inferred, state, path)) is not None:
        tree[moments.NOTE] = note
    with atomic_write(path, durable=durable) as output:
        _write_tree(DeferredErrors(output), tree, path, progress, h5py)


def _write_tree(output: DeferredErrors, tree: Tree, path: Path, progress: Progress | None, h5py: Any) -> None:
    """Hide write errors from HDF5: they may crash the process, at once or at exit."""

    def advance(count: int) -> None:
        output.check()
        if progress:
            progress(count)

    try:
        with h5py.File(output, "w", libver="earliest") as file:
            _store(file, tree, path, advance, h5py.string_dtype())
    finally:
        output.check()


def _check_names(inferred: CheckpointState, state: CheckpointState, path: Path) -> None:
    """A `/` nests groups: a name must not be mistaken for another weight's, or for a moment."""
    found, wanted = (
        {param: sorted(states.keys() - {"step"}) for group in each.optimizer.values() for param, states in group.states.items()}
        for each in (inferred, state)
    )
    odd = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    odd += sorted(inferred.parameters.keys() ^ state.parameters.keys())
    if odd or not same_aliases(inferred, state):
        raise UnsupportedError(
            "a name that would be read back as another one", path=path, field=[*odd, "mixed_precision"][0], remedy="Rename it."
        )


def _from_tree(tree: Tree, path: Path) -> CheckpointState:
    model = _branch(tree, "model", path)
    if "model" not in tree:
        raise CorruptFileError("an HDF5 file, but no checkpoint of ORTTrainer (no `model` in it)", path=path)
    state = CheckpointState(properties=_properties(tree, path), partitions=_partitions(tree, path))
    weights = dict(_leaves(_branch(model, "full_precision", path)))
    for name, alias in _leaves(_branch(model, "mixed_precision", path)):
        base, dtype = split_half_suffix(name)
        known = base if dtype is not None and name not in weights else name
        if is_string(alias) or alias.dtype not in (torch.float16, torch.bfloat16) or known in state.mixed_precision:
            raise CorruptFileError("not the half-precision alias of one weight", path=path, field=f"model/mixed_precision/{name}")
        state.mixed_precision[known] = alias
    if "optimizer" in tree:
        state.optimizer[moments.GROUP] = _optimizer(_branch(tree, "optimizer", path), state.properties, path)
    states = state.optimizer[moments.GROUP].states if state.optimizer else {}
    sharded = state.properties.get(names.ZERO_STAGE, 0) != 0  # other ranks may hold the moments
    for name, value in weights.items():
        home = state.trainable if sharded or not states or name in states else state.frozen
        home[name] = value
    return state


def _optimizer(tree: Tree, properties: Mapping[str, Any], path: Path) -> OptimizerGroup:
    tree = dict(tree)
    shared = _branch(tree, _SHARED, path).get(moments.SHARED_STEP)
    if shared is not None:
        tree.pop(_SHARED)
    if isinstance(shared, dict):
        raise CorruptFileError("not a number", path=path, field=f"optimizer/{_SHARED}/{moments.SHARED_STEP}")
    states: moments.States = {}
    for name, value in _leaves(tree, empty=True):
        if isinstance(value, dict):
            states.setdefault(name, {})
        else:
            weight, _, moment = name.rpartition("/")
            states.setdefault(weight, {})[moment] = value
    return moments.to_group(states, shared, properties, path)


def _properties(tree: Tree, path: Path) -> dict[str, int | float | str]:
    options = {name: _scalar(value, path, f"trainer_options/{name}") for name, value in _branch(tree, "trainer_options", path).items()}
    if all(options.get(name, default) == default for name, default in _ALONE.items()):
        options = {name: value for name, value in options.items() if name not in _ALONE}
    for name, value in _branch(tree, "train_step_info", path).items():
        options[_STEPS.get(name, name)] = _scalar(value, path, f"train_step_info/{name}")
    if "user_dict" in tree:
        options[names.USER_DICT] = _text(tree["user_dict"], path, "user_dict")
    return options


def _partitions(tree: Tree, path: Path) -> dict[str, PartitionInfo]:
    found: dict[str, dict[str, Value]] = {}
    for name, value in _leaves(_branch(tree, "partition_info", path)):
        weight, _, key = name.rpartition("/")
        found.setdefault(weight, {})[key] = value
    infos = {}
    for weight, entry in found.items():
        dims, axis = entry.get("original_dim"), entry.get("megatron_row_partition")
        if (
            dims is None
            or axis is None
            or any(is_string(x) or x.dtype != torch.int64 or x.numel() > 64 for x in (dims, axis))
            or axis.numel() != 1
        ):
            raise CorruptFileError("not a shape and the number of an axis", path=path, field=f"partition_info/{weight}")
        infos[weight] = PartitionInfo(tuple(dims.reshape(-1).tolist()), int(axis))
    return infos


def _to_tree(state: CheckpointState, path: Path) -> Tree:
    """The state as nested names, the way `ORTTrainer.state_dict()` has it."""
    tree: Tree = {"model": {"full_precision": dict(state.parameters)}}
    if state.mixed_precision:
        tree["model"]["mixed_precision"] = dict(state.mixed_precision)
    group = moments.only_group(state, path)
    options = dict(state.properties)
    if group is not None:
        lamb = options.get(names.OPTIMIZER_NAME) == names.LAMB
        states, shared = moments.from_group(group, lamb, path)
        tree["optimizer"] = {**states, **({_SHARED: {moments.SHARED_STEP: shared}} if shared is not None else {})}
        if shared is not None and _SHARED in states:
            raise UnsupportedError("a weight with the name of Lamb's own state", path=path, field=_SHARED, remedy="Rename it.")
    tree["trainer_options"] = {
        names.MIXED_PRECISION: bool(options.get(names.MIXED_PRECISION, bool(state.mixed_precision))),
        names.OPTIMIZER_NAME: str(options.get(names.OPTIMIZER_NAME, names.ADAM if group is None or group.states else names.SGD)),
        **{name: _integer(options.get(name, _ALONE[name]), path, name) for name in _RANK_OPTIONS},
    }
    if steps := {theirs: _integer(options[ours], path, ours) for theirs, ours in _STEPS.items() if isinstance(options.get(ours), int)}:
        tree["train_step_info"] = steps
    if state.partitions:
        tree["partition_info"] = {
            name: {
                "original_dim": torch.tensor(info.original_dim, dtype=torch.int64),
                "megatron_row_partition": torch.tensor([info.megatron_row_partition]),
            }
            for name, info in state.partitions.items()
        }
    if isinstance(user := options.get(names.USER_DICT), str):
        tree["user_dict"] = user
    return tree


def _store(group: Any, tree: Tree, path: Path, progress: Progress, text: Any) -> None:
    for name, value in sorted(tree.items()):
        where = f"{group.name.strip('/')}/{name}".lstrip("/")
        if any(part in ("", ".") for part in name.split("/")) or "\0" in name or not is_unicode(name):
            raise UnsupportedError("a name that HDF5 can't keep", path=path, field=where, remedy="Rename it.")
        try:
            if isinstance(value, dict):
                _store(group.create_group(name), value, path, progress, text)
            elif isinstance(value, torch.Tensor):
                group.create_dataset(name, data=_array(value, path, where))
                progress(nbytes(value))
            elif isinstance(value, (str, np.ndarray)):
                group.create_dataset(name, data=_stored_text(value, path, where), dtype=text)
            else:
                group[name] = value
        except (ValueError, TypeError) as error:  # `a` and `a/b`: one name can't be a dataset and a group
            raise UnsupportedError(f"clashes with the name of another ({error})", path=path, field=where, remedy="Rename one.") from error


def _array(value: torch.Tensor, path: Path, where: str) -> Any:
    if value.is_meta:
        raise UnsupportedError("has no data (a meta tensor)", path=path, field=where)
    if value.dtype.is_complex or value.dtype == torch.bfloat16 or "float8" in str(value.dtype):
        raise UnsupportedError(
            f"ORTTrainer's files have no {str(value.dtype).removeprefix('torch.')}", path=path, field=where, remedy="Convert it first."
        )
    return value.detach().resolve_neg().cpu().contiguous().numpy()


def _stored_text(value: Any, path: Path, where: str) -> Any:
    texts = [value] if isinstance(value, str) else value.reshape(-1).tolist()
    if any("\0" in text for text in texts) or not all(is_unicode(text) for text in texts):
        raise UnsupportedError("text that HDF5 can't keep (it has a zero in it, or is no Unicode)", path=path, field=where)
    return value


def _leaves(tree: Tree, prefix: str = "", empty: bool = False) -> Iterator[tuple[str, Any]]:
    """Tensors below a group under their full names; with `empty`, groups with nothing in them too."""
    for name, value in tree.items():
        if isinstance(value, dict) and (value or not empty):
            yield from _leaves(value, f"{prefix}{name}/", empty)
        else:
            yield prefix + name, value


def _branch(tree: Tree, name: str, path: Path) -> Tree:
    branch = tree.get(name, {})
    if not isinstance(branch, dict):
        raise CorruptFileError("expected a group, found a dataset", path=path, field=name)
    return branch


def _scalar(value: Any, path: Path, where: str) -> int | float | str:
    if isinstance(value, dict) or (isinstance(value, torch.Tensor) and value.numel() != 1):
        raise CorruptFileError("not one value", path=path, field=where)
    if is_string(value):
        return _text(value, path, where)
    number = value if isinstance(value, (bool, int, float, str)) else value.item()
    return int(number) if isinstance(number, bool) else number


def _text(value: Any, path: Path, where: str) -> str:
    if isinstance(value, str):
        return value
    if not is_string(value) or value.size != 1:
        raise CorruptFileError("not one text", path=path, field=where)
    return str(value.reshape(-1)[0])


def _integer(value: Any, path: Path, where: str) -> int:
    if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise UnsupportedError("not an integer of 64 bits", path=path, field=f"properties/{where}")
    return int(value)


def _unpickled(text: str, path: Path) -> Any:
    try:
        return pickle.loads(bytes.fromhex(text))
    except (ValueError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError) as error:
        raise CorruptFileError(f"can't be unpickled ({error})", path=path, field="user_dict") from error
