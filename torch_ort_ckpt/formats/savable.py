"""What every state must be, whatever format it goes to: names are text, tensors are plain, numbers fit.

States may come from users or other libraries. What can't be restored from a file is refused here, by name, before anything is written.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from ..checkpoint.state import CheckpointState, Value, is_string
from ..errors import UnsupportedError
from ..storage.files import warn
from ..storage.paths import PathLike
from .soundness import check_partition, encode_string, group_problems, is_unicode, names_in


def check_savable(state: CheckpointState, path: PathLike) -> None:
    """Raise `UnsupportedError` with the field that can't be written."""
    for field, name in names_in(state):
        if not isinstance(name, str):
            _refuse(f"a name that is not text: {name!r}", path, field, "Names are strings.")
        if not is_unicode(name):
            _refuse("a name that is not Unicode text", path, f"{field}/{name}", "Rename it.")
    for group_name, group in state.optimizer.items():
        if type(group.step) is not int:
            _refuse(f"step is a {type(group.step).__name__}, not an int", path, f"optimizer/{group_name}")
        for key in ("initial_lr", "lr"):
            rate = getattr(group, key)
            if not (isinstance(rate, (int, float)) and not isinstance(rate, bool)) and not (key == "lr" and rate is None):
                _refuse(f"{key} is a {type(rate).__name__}, not a number", path, f"optimizer/{group_name}", "Pass float(rate).")
    if both := state.trainable.keys() & state.frozen.keys():
        _refuse("both trainable and frozen", path, min(both))
    for label, value in state.tensors():
        _check_tensor(value, path, label)
    for field, problem in group_problems(state):
        _refuse(problem, path, field)
    for name, alias in state.mixed_precision.items():
        if is_string(alias) or alias.dtype not in (torch.float16, torch.bfloat16):
            _refuse("a half-precision alias must be float16 or bfloat16", path, f"mixed_precision/{name}")
        if is_string(state.parameters.get(name)):
            _refuse("a half-precision alias of a string tensor", path, f"mixed_precision/{name}")
    for name, text in state.properties.items():
        if isinstance(text, str):
            encode_string(text, path, f"properties/{name}")
    for name, info in state.partitions.items():
        try:
            check_partition(info)
        except (TypeError, ValueError) as error:
            _refuse(f"not a partition ({error})", path, f"partitions/{name}")
        numbers = (*info.original_dim, info.megatron_row_partition)
        if not isinstance(info.original_dim, tuple) or not all(-(1 << 63) <= number < 1 << 63 for number in numbers):
            _refuse("not a partition (a tuple and an axis, of 64-bit integers)", path, f"partitions/{name}")


def warn_of_nominal(state: CheckpointState, path: PathLike) -> None:
    """A nominal checkpoint has names and types only: warn if the state has more."""
    if not state.nominal:
        return
    held = [name for name, value in state.parameters.items() if value.shape or (value.item() if is_string(value) else not value.is_meta)]
    if held:
        warn(f"{path}: a nominal checkpoint holds no shapes and values; those of {len(held)} tensors are left out: {', '.join(held[:5])}")


def _check_tensor(value: Value, path: PathLike, where: str) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized or value.is_nested:
            kind = "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            _refuse(f"a {kind} tensor; checkpoints hold dense ones", path, where, "Pass .dequantize() or .to_dense().")
        return
    if not is_string(value) or value.dtype != object:
        kind = f"numpy array of {value.dtype}" if is_string(value) else type(value).__name__
        _refuse(f"a {kind}, neither a torch.Tensor nor a numpy array of strings (dtype object)", path, where, "Use torch.from_numpy.")
    for text in value.reshape(-1).tolist():
        if not isinstance(text, str):
            _refuse(f"a {type(text).__name__} among the strings", path, where, "Convert it to str first.")
        encode_string(text, path, where)


def _refuse(what: str, path: PathLike, field: str, remedy: str | None = None) -> NoReturn:
    raise UnsupportedError(what, path=path, field=field, remedy=remedy)
