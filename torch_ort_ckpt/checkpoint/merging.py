"""Merging the ranks of a partitioned set into one state, in the memory of the merged model plus one rank.

Two passes over the ranks. The first reads only shapes: it checks that the set is complete and from one run, and determines where each
piece goes. The second copies pieces to their places and compares replicas. ORT's own aggregation joined the flat ZeRO
pieces of a weight cut by columns before undoing that cut, which scrambled it; here each piece goes to the rows it came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ..errors import CheckpointError
from ..storage.files import warn
from . import properties as names
from .partition import WHOLE, Place, local_part, local_shape, place_of, stretches
from .state import CheckpointState, OptimizerGroup, Value, alias_name, is_string, same_number, same_tensor

Source: TypeAlias = Callable[[], CheckpointState]
Label: TypeAlias = tuple[str, ...]
"""Which tensor: `("weight", w)`, `("alias", w)` or `("moment", group, w, moment)`."""

_SAME = (names.STEP, names.WEIGHT_UPDATE_STEP, names.ROUND, names.OPTIMIZER_NAME, names.MIXED_PRECISION)
"""Properties that all ranks of one run share at one moment."""


def merge_ranks(sources: Sequence[Source], labels: Sequence[str], *, stages: bool = False) -> CheckpointState:
    """One state from all ranks of a set, given in any order as functions that open them (each is called twice).

    With `stages`, the states are pipeline stages in order, without properties for their rank.
    """
    if not sources:
        raise CheckpointError("no ranks to merge", remedy="Give at least one rank file.")
    survey = _Survey(len(sources), stages)
    for index, source in enumerate(sources):
        survey.add(index, labels[index], source())
    survey.finish()
    result = _Result(survey)
    for index in survey.order():
        result.fill(index, sources[index]())
    return result.state()


@dataclass
class _Seen:
    """What the survey knows about one tensor."""

    dtype: Any
    axis: int
    shape: tuple[int, ...]
    pieces: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Source index -> shape of what it holds."""


@dataclass
class _Weight:
    shape: tuple[int, ...]
    axis: int
    told_by: str


class _Survey:
    """The first pass."""

    def __init__(self, count: int, stages: bool) -> None:
        self.count, self.stages = count, stages
        self.places: list[Place] = []
        self.labels: list[str] = []
        self.properties: list[dict[str, Any]] = []
        self.weights: dict[str, _Weight] = {}
        self.tensors: dict[Label, _Seen] = {}
        self.groups: dict[str, OptimizerGroup] = {}
        self.steps: dict[tuple[str, str], tuple[int, str]] = {}
        self.frozen: set[str] = set()
        self.offsets: dict[tuple[Label, int], int] = {}
        self.sequence: list[str] = []

    def add(self, index: int, label: str, state: CheckpointState) -> None:
        if state.nominal:
            raise CheckpointError(f"{label} is nominal: it has no data", path=label, remedy="Leave it out, or give it weights first.")
        place = Place(index, self.count, 1, 1, 0) if self.stages else place_of(state, label)
        self.places.append(place)
        self.labels.append(f"rank {place.rank} ({label})")
        self.properties.append(dict(state.properties))
        self._check_run(index)
        for name, info in state.partitions.items():
            found = _Weight(info.original_dim, info.megatron_row_partition, self.labels[index])
            known = self.weights.setdefault(name, found)
            if (known.shape, known.axis) != (found.shape, found.axis):
                raise self.error(
                    f"{found.told_by} has shape {found.shape} cut on axis {found.axis}, {known.told_by} {known.shape} on {known.axis}",
                    name,
                )
            if any(size < 0 for size in found.shape):
                raise self.error(f"{found.told_by} has the impossible shape {found.shape}", name)
        for name in state.frozen:
            self.frozen.add(name)
        for key, value in _tensors(state):
            dtype = "string" if is_string(value) else value.dtype
            seen = self.tensors.setdefault(key, _Seen(dtype, WHOLE, ()))
            if seen.dtype != dtype:
                raise self.error(f"{self.labels[index]} has {dtype}, others {seen.dtype}", key[-1] if key[0] != "moment" else key[2])
            seen.pieces[index] = tuple(value.shape)
        for name, group in state.optimizer.items():
            self._add_group(index, name, group)

    def _check_run(self, index: int) -> None:
        place, first = self.places[index], self.places[0]
        for kind, here, there in (
            ("world size", place.world_size, first.world_size),
            ("data-parallel size", place.data_size, first.data_size),
            ("horizontal size", place.horizontal_size, first.horizontal_size),
            ("ZeRO stage", place.zero_stage, first.zero_stage),
        ):
            if here != there:
                raise self.error(
                    f"{self.labels[index]} has {kind} {here}, {self.labels[0]} has {there}: they belong to different runs", None
                )
        for earlier in range(index):
            if self.places[earlier].rank == place.rank:
                raise self.error(f"{self.labels[index]} and {self.labels[earlier]} are the same rank", None)
        for name in _SAME:
            mine, theirs = self.properties[index].get(name), self.properties[0].get(name)
            if not self.stages and not same_number(mine, theirs):
                raise self.error(
                    f"{self.labels[index]} has {name} {mine!r}, {self.labels[0]} {theirs!r}: they were saved at different moments", name
                )

    def _add_group(self, index: int, name: str, group: OptimizerGroup) -> None:
        known = self.groups.setdefault(name, OptimizerGroup(group.step, group.initial_lr, group.lr, {}, dict(group.hyperparameters)))
        if not (
            same_number(known.initial_lr, group.initial_lr)
            and same_number(known.lr, group.lr)
            and known.hyperparameters == group.hyperparameters
        ):
            raise self.error(f"{self.labels[index]} has another learning rate or other hyper-parameters than the rest", f"optimizer/{name}")
        known.step = max(known.step, group.step)
        for param, moments in group.states.items():
            step = int(moments["step"]) if "step" in moments else group.step
            there = self.steps.setdefault((name, param), (step, self.labels[index]))
            if there[0] != step:
                raise self.error(f"{self.labels[index]} updated it {step} times, {there[1]} {there[0]} times", param)

    def finish(self) -> None:
        first = self.places[0]
        present = {place.rank for place in self.places}
        if absent := sorted(set(range(min(first.world_size, 1 << 20))) - present):
            raise self.error(f"rank {', '.join(map(str, absent[:8]))} of {first.world_size} is missing", None)
        for key, seen in self.tensors.items():
            self._settle(key, seen)
        self._sort_weights()

    def order(self) -> list[int]:
        return sorted(range(len(self.places)), key=lambda index: self.places[index].rank)

    def _settle(self, key: Label, seen: _Seen) -> None:
        """Determine the tensor's full shape, and where each piece goes."""
        name = _weight(key)
        weight = self.weights.get(name)
        if () in seen.pieces.values() and (key[0] == "moment" or weight is None):
            weight = None  # one number per weight is never cut
        seen.shape = weight.shape if weight else next(iter(seen.pieces.values()))
        seen.axis = weight.axis if weight else WHOLE
        parts = self.places[0].horizontal_size
        if seen.dtype == "string":
            seen.axis = WHOLE
        local = local_shape(seen.shape, seen.axis, parts, name)
        filled: dict[tuple[int, int], int] = {}  # (stage, horizontal) -> elements of pieces so far; -1 whole
        for index in self.order():
            if index not in seen.pieces:
                continue
            place, shape = self.places[index], seen.pieces[index]
            corner = place.stage, place.horizontal
            if shape == local:
                if filled.get(corner, -1) != -1:
                    raise self.error(f"{self.labels[index]} has all of it, other ranks a piece", name)
                filled[corner] = -1
            elif place.sharded and len(shape) == 1 and shape[0] < math.prod(local) and filled.get(corner, 0) != -1:
                self.offsets[key, index] = filled.get(corner, 0)
                filled[corner] = filled.get(corner, 0) + shape[0]
            else:
                raise self.error(f"{self.labels[index]} has shape {shape}, where {local} or a flat piece of it belongs", name)
        for (stage, horizontal), count in filled.items():
            if count not in (-1, math.prod(local)):
                where = f"stage {stage}, horizontal rank {horizontal}"
                raise self.error(f"the pieces of {where} make {count} of {math.prod(local)} elements ({'/'.join(key[3:]) or key[0]})", name)
        if seen.axis != WHOLE:
            for stage in {stage for stage, _ in filled}:
                if absent := sorted(set(range(parts)) - {horizontal for own, horizontal in filled if own == stage}):
                    raise self.error(f"no rank has the part of horizontal rank {absent[0]} ({'/'.join(key[3:]) or key[0]})", name)

    def _sort_weights(self) -> None:
        """Weights in an order in which ZeRO would cut them the same way again.

        Per rank: what goes on from the rank before, what it has whole (empty ones first: at its end they would be the next rank's), what
        goes on in the next.
        """
        ordered: dict[str, None] = {}
        for index in self.order():
            if self.places[index].horizontal or not self.places[index].sharded:
                continue
            own = [key for key, seen in self.tensors.items() if index in seen.pieces]
            cut = {_weight(key): self.offsets[key, index] for key in own if (key, index) in self.offsets}
            kind = "moment" if any(key[0] == "moment" for key in own) else "weight"
            middle = [_weight(key) for key in own if key[0] == kind and _weight(key) not in cut]
            middle.sort(key=lambda name: math.prod(self.tensors["weight", name].shape) > 0 if ("weight", name) in self.tensors else True)
            ordered.update(dict.fromkeys([*(name for name in cut if cut[name]), *middle, *cut]))
        ordered.update(dict.fromkeys(_weight(key) for key in self.tensors))
        self.sequence = list(ordered)

    def error(self, message: str, name: str | None) -> CheckpointError:
        return CheckpointError(message, field=name, remedy="Check that the files are all ranks of one save.")


class _Result:
    """The second pass."""

    def __init__(self, survey: _Survey) -> None:
        self.survey = survey
        self.values: dict[Label, Value] = {}
        self.owner: dict[tuple[Label, int, int], int] = {}
        self.writers: dict[tuple[Label, int], tuple[int, int]] = {}

    def fill(self, index: int, state: CheckpointState) -> None:
        survey, place = self.survey, self.survey.places[index]
        for key, value in _tensors(state):
            seen = survey.tensors.get(key)
            if seen is None or seen.pieces.get(index) != tuple(value.shape):
                raise CheckpointError(f"{survey.labels[index]} changed while it was being read", field=_weight(key))
            if is_string(value):
                self._replica(key, index, same_tensor(self.values.setdefault(key, value), value))
                continue
            if key not in self.values:
                self.values[key] = torch.empty(seen.shape, dtype=value.dtype)
            part = 0 if seen.axis == WHOLE else place.horizontal
            region = local_part(self.values[key], seen.axis, part, place.horizontal_size)
            start = survey.offsets.get((key, index), 0)
            corner = self.writers.setdefault((key, part), (place.stage, place.horizontal))
            fresh = corner == (place.stage, place.horizontal)
            if (key, index) not in survey.offsets:
                fresh = fresh and self.owner.setdefault((key, part, place.stage), index) == index
            flat = value.detach().contiguous().reshape(-1)
            for view, first, last in stretches(region, start, start + flat.numel()):
                piece = flat[first:last].view(view.shape)
                if fresh:
                    view.copy_(piece)
                else:
                    self._replica(key, index, same_tensor(view, piece))

    def _replica(self, key: Label, index: int, same: bool) -> None:
        if not same:
            what = "its half-precision alias" if key[0] == "alias" else "/".join(key[3:]) or "it"
            raise self.survey.error(
                f"{self.survey.labels[index]}: {what} differs from the ranks before it, and all must be equal", _weight(key)
            )

    def state(self) -> CheckpointState:
        survey = self.survey
        state = CheckpointState(properties=self._properties())
        updated = {param for _, param in survey.steps}
        zero = any(place.sharded for place in survey.places)
        for name in survey.sequence:
            if ("weight", name) in self.values:
                still = name in survey.frozen or (zero and bool(updated) and name not in updated)
                (state.frozen if still else state.trainable)[name] = self.values["weight", name]
            if ("alias", name) in self.values:
                self._add_alias(state, name, self.values["alias", name])
        moments: dict[tuple[str, ...], dict[str, Value]] = {}
        for key, value in self.values.items():
            if key[0] == "moment":
                moments.setdefault(key[1:3], {})[key[3]] = value
        for name, group in survey.groups.items():
            state.optimizer[name] = group
            steps = {param: step for (owner, param), (step, _) in survey.steps.items() if owner == name}
            group.step = max(steps.values(), default=group.step)
            for param in survey.sequence:
                if param in steps:
                    group.states[param] = moments.get((name, param), {})
                    if steps[param] != group.step:
                        group.states[param]["step"] = torch.tensor(steps[param])
        return state

    def _add_alias(self, state: CheckpointState, name: str, alias: torch.Tensor) -> None:
        master = self.values.get(("weight", name))
        if master is None:  # a whole state has no master for it
            state.frozen[alias_name(name, alias)] = alias
        elif is_string(master) or master.shape != alias.shape or master.element_size() < 4 or not master.is_floating_point():
            raise self.survey.error(f"can't be the master of a half-precision alias of shape {tuple(alias.shape)}", name)
        else:
            state.mixed_precision[name] = alias

    def _properties(self) -> dict[str, Any]:
        order = self.survey.order()
        merged = dict(self.survey.properties[order[0]])
        differing = set()
        for index in order[1:]:
            for name, value in self.survey.properties[index].items():
                if name not in merged:
                    merged[name] = value
                elif name not in names.RANK and not same_number(merged[name], value):
                    differing.add(name)
        if differing:
            warn(f"properties that differ between ranks are kept as in the first rank that has them: {', '.join(sorted(differing)[:5])}")
        return {name: value for name, value in merged.items() if name not in names.RANK}


def _tensors(state: CheckpointState) -> Iterator[tuple[Label, Value]]:
    """Everything that is merged as a tensor; steps are numbers of their own."""
    kinds: tuple[tuple[str, Mapping[str, Value]], ...] = (("weight", state.parameters), ("alias", state.mixed_precision))
    for kind, values in kinds:
        for name, value in values.items():
            yield (kind, name), value
    for group_name, group in state.optimizer.items():
        for param, moments in group.states.items():
            for moment, value in moments.items():
                if moment != "step":
                    yield ("moment", group_name, param, moment), value


def _weight(key: Label) -> str:
    return key[2] if key[0] == "moment" else key[1]
