"""Checks that a checkpoint is complete and its values are valid."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..checkpoint.backing import release_pages
from ..checkpoint.state import CheckpointState, Value, is_string
from ..errors import CheckpointError, printable
from ..formats import detect, load, module
from ..storage.buffers import readable
from ..storage.files import Progress
from ..storage.paths import PathLike, as_path

_CHUNK = 1 << 22


@dataclass
class Verification:
    """The result of `verify`: the problems found, as text. True if there are none."""

    path: str
    format: str | None = None
    tensors: int = 0
    problems: list[str] = field(default_factory=list)
    repaired: bool = False

    def __bool__(self) -> bool:
        return not self.problems


def verify(path: PathLike, *, format: str | None = None, repair: bool = False, progress: Progress | None = None) -> Verification:
    """Read every byte: structure, NaN and infinity, aliases that disagree, moments that do not fit.

    `repair` completes a save that was interrupted between renaming its files.
    """
    place = as_path(path)
    result = Verification(str(path))
    try:
        result.format = format or detect(path)
        fix = getattr(module(result.format), "repair", None)
        if repair and fix is not None:
            with readable(place):
                result.repaired = fix(place)
        state = load(path, format=result.format)
        for name, value in state.tensors():
            result.tensors += 1
            result.problems += [printable(f"{name}: {problem}") for problem in tensor_problems(value)]
            release_pages(state)
            if progress:
                progress(0 if is_string(value) else value.nbytes)
        result.problems += map(printable, state_problems(state))
    except CheckpointError as error:
        result.problems.append(str(error))
    return result


def tensor_problems(value: Value) -> list[str]:
    if is_string(value) or value.is_meta or value.numel() == 0:
        return []
    if value.dtype == torch.bool:
        return ["holds bytes that are neither 0 nor 1"] if bool((value.view(torch.uint8) > 1).any()) else []
    if not value.is_floating_point():
        return []
    nan = infinite = 0
    flat = value.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        piece = flat[start : start + _CHUNK]
        piece = piece.float() if piece.element_size() < 4 else piece
        nan += int(piece.isnan().sum())
        infinite += int(piece.isinf().sum())
    found = [(nan, "NaN"), (infinite, "infinite")]
    return [f"{count} of {flat.numel()} elements are {what}" for count, what in found if count]


def state_problems(state: CheckpointState) -> list[str]:
    """What is wrong between tensors rather than inside one."""
    problems = [f"mixed_precision/{name}: differs from its rounded master" for name in state.stale_aliases()]
    parameters = state.parameters
    for group_name, group in state.optimizer.items():
        if group.step < 0:
            problems.append(f"optimizer/{group_name}: negative step {group.step}")
        for param, moments in group.states.items():
            where = f"optimizer/{group_name}/{param}"
            if param not in parameters:
                problems.append(f"{where}: moments of a parameter that does not exist")
                continue
            shape = tuple(parameters[param].shape)
            for moment, value in moments.items():
                if moment.startswith("momentum") and tuple(value.shape) != shape and not (state.nominal or param in state.partitions):
                    problems.append(f"{where}/{moment}: shape {tuple(value.shape)}, the parameter has {shape}")
    return problems
