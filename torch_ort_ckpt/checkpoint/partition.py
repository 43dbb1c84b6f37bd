"""Partitioned states: which rank of a distributed run holds which piece, and `split`, which cuts a whole state into ranks.

A run has P pipeline stages x D data-parallel x H horizontal (Megatron) ranks; world rank = (stage * D + d) * H + h, as in ORT. Megatron
cuts a weight by columns or rows into H parts. ZeRO stage 1 lays the trainable weights of a stage end to end, pads them to a multiple of
32 x D (by one element at least) and gives each of the D ranks an equal stretch: of the moments in fp32, of masters and moments in mixed
precision.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CheckpointError
from ..storage.paths import PathLike, as_path, refuse_url
from . import properties as names
from .state import CheckpointState, OptimizerGroup, PartitionInfo, Value, is_string

COLUMN, ROW, WHOLE = 0, 1, -1
"""ORT's numbers for the axis that Megatron cut: the last, the first, none."""

PADDING = 32


@dataclass(frozen=True)
class Place:
    """A rank's place in its run."""

    rank: int
    world_size: int
    data_size: int
    horizontal_size: int
    zero_stage: int

    @property
    def horizontal(self) -> int:
        return self.rank % self.horizontal_size

    @property
    def data(self) -> int:
        return self.rank // self.horizontal_size % self.data_size

    @property
    def stage(self) -> int:
        return self.rank // (self.horizontal_size * self.data_size)

    @property
    def sharded(self) -> bool:
        return self.zero_stage > 0 and self.data_size > 1


def place_of(state: CheckpointState, label: str) -> Place:
    """The rank that the state's properties give."""

    def number(name: str, default: int | None = None) -> int:
        value = state.properties.get(name, default)
        if not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise CheckpointError(
                f"{label} does not say its {name}",
                field=name,
                remedy="If it is not of a set, load it alone; pipeline stages that do not say their place: merge them with stages=True.",
            )
        return value

    data, horizontal = number(names.DATA_PARALLEL_SIZE, 1), number(names.HORIZONTAL_PARALLEL_SIZE, 1)
    place = Place(number(names.WORLD_RANK), number(names.WORLD_SIZE), data, horizontal, number(names.ZERO_STAGE, 0))
    if not data or not horizontal or place.world_size % (data * horizontal) or place.rank >= place.world_size:
        raise CheckpointError(
            f"{label}: rank {place.rank} of {place.world_size} does not match {data} x {horizontal} data and horizontal ranks",
            field=names.WORLD_RANK,
        )
    return place


def local_shape(shape: Sequence[int], axis: int, parts: int, name: str) -> tuple[int, ...]:
    """The shape of one horizontal rank's part."""
    if axis == WHOLE or parts == 1:
        return tuple(shape)
    index = -1 if axis == COLUMN else 0
    if axis not in (COLUMN, ROW) or not shape or shape[index] % parts:
        raise CheckpointError(
            f"a weight of shape {tuple(shape)} can't be cut in {parts} along axis {axis}",
            field=name,
            remedy="Choose a number of parts that divides it.",
        )
    local = list(shape)
    local[index] //= parts
    return tuple(local)


def local_part(value: torch.Tensor, axis: int, part: int, parts: int) -> torch.Tensor:
    """One horizontal rank's part of a whole weight: a view."""
    if axis == WHOLE or parts == 1:
        return value
    dimension = value.dim() - 1 if axis == COLUMN else 0
    size = value.shape[dimension] // parts
    return value.narrow(dimension, part * size, size)


def stretches(region: torch.Tensor, start: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Views that together are the elements `start` to `stop` of `region` in row-major order, each with its range within the stretch.

    A part of a matrix cut by columns is not in one piece in memory: at most a partial row, whole rows and another partial row are.
    """
    if region.is_contiguous():
        yield region.view(-1)[start:stop], 0, stop - start
        return
    rows = region.flatten(0, -2) if region.dim() > 2 else region
    width, position = rows.shape[-1], start
    while position < stop:
        row, column = divmod(position, width)
        whole = (stop - position) // width if column == 0 else 0
        if whole:
            view, size = rows[row : row + whole], whole * width
        else:
            size = min(width - column, stop - position)
            view = rows[row, column : column + size]
        yield view, position - start, position - start + size
        position += size


@dataclass(frozen=True)
class PartitionPlan:
    """How to cut a state: sizes, which weights Megatron cuts along which axis, which weights each pipeline stage has.

    `mixed_precision` (default: as the state says) decides whether ZeRO cuts the masters too. `order` is the order in which ZeRO lays out
    the weights; those it does not name follow in the order of the state.
    """

    data_parallel_size: int = 1
    horizontal_parallel_size: int = 1
    zero_stage: int | None = None
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    stages: tuple[tuple[str, ...], ...] = ()
    mixed_precision: bool | None = None
    order: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.data_parallel_size < 1 or self.horizontal_parallel_size < 1:
            raise CheckpointError("parallel sizes must be positive", field="plan", remedy="Use 1 where nothing is cut.")
        if self.zero_stage not in (None, 0, 1):
            raise CheckpointError(f"ZeRO stage {self.zero_stage}; ORT has 0 and 1", field="plan", remedy="Use zero_stage=1.")
        if both := set(self.columns) & set(self.rows):
            raise CheckpointError("cut by columns and by rows", field=min(both), remedy="Name the weight in one of them only.")

    @classmethod
    def from_json(cls, source: PathLike | Mapping[str, Any]) -> PartitionPlan:
        """From a mapping, or a JSON file, with the names of the fields."""
        refuse_url(source)
        path = None if isinstance(source, Mapping) else source
        try:
            content = dict(source) if isinstance(source, Mapping) else json.loads(as_path(source).read_text(encoding="utf-8"))
            values = {key: _tuples(value) for key, value in content.items()}
            return cls(**values)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            known = ", ".join(item.name for item in dataclasses.fields(cls))
            raise CheckpointError(f"not a plan ({error})", path=path, remedy=f"A JSON object with any of: {known}.") from error

    @classmethod
    def of(cls, ranks: Iterable[CheckpointState]) -> PartitionPlan:
        """The plan by which this set of ranks was cut (any order): `split(merge(ranks), PartitionPlan.of(ranks))` gives them again."""
        places = sorted(((place_of(state, f"rank {n}"), state) for n, state in enumerate(ranks)), key=lambda item: item[0].rank)
        if not places:
            raise CheckpointError("no ranks", remedy="Give at least one rank.")
        first, state = places[0]
        axes = {name: info.megatron_row_partition for _, state in places for name, info in state.partitions.items()}
        stages = [
            tuple(dict.fromkeys(name for place, state in places if place.stage == stage for name in _everything(state)))
            for stage in range(first.world_size // (first.data_size * first.horizontal_size))
        ]
        return cls(
            first.data_size,
            first.horizontal_size,
            first.zero_stage,
            tuple(sorted(name for name, axis in axes.items() if axis == COLUMN)),
            tuple(sorted(name for name, axis in axes.items() if axis == ROW)),
            tuple(stages) if len(stages) > 1 else (),
            bool(state.properties.get(names.MIXED_PRECISION, bool(state.mixed_precision))),
        )

    @property
    def zero(self) -> int:
        """ZeRO's stage: 0 for none, 1 where the optimizer's state is divided."""
        return self.zero_stage if self.zero_stage is not None else int(self.data_parallel_size > 1)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return max(len(self.stages), 1) * self.data_parallel_size * self.horizontal_parallel_size

    def axis(self, name: str) -> int:
        """ORT's number for how this weight is cut: -1 not at all, 0 by columns, 1 by rows."""
        if self.horizontal_parallel_size == 1:
            return WHOLE
        return COLUMN if name in self.columns else ROW if name in self.rows else WHOLE


def split(state: CheckpointState, plan: PartitionPlan | Mapping[str, Any]) -> list[CheckpointState]:
    """Cut a whole state into the ranks of a plan, in order of world rank. Pieces are views where they can be."""
    plan = plan if isinstance(plan, PartitionPlan) else PartitionPlan.from_json(plan)
    if state.nominal:
        raise CheckpointError("a nominal state has nothing to cut", remedy="Complete it first.")
    if names.WORLD_RANK in state.properties:
        raise CheckpointError("one rank of a set, not a whole state", field=names.WORLD_RANK, remedy="Merge the set first.")
    everything = _everything(state)
    for name in {*plan.columns, *plan.rows, *plan.order, *(name for stage in plan.stages for name in stage)}:
        if name not in everything:
            raise CheckpointError(
                "the plan names a weight that the state does not have", field=name, remedy="`torch-ort-ckpt inspect` lists the names."
            )
    for name in {*plan.columns, *plan.rows} & state.parameters.keys():
        local_shape(state.parameters[name].shape, plan.axis(name), plan.horizontal_parallel_size, name)
    if plan.stages and (missing := everything - {name for stage in plan.stages for name in stage}):
        raise CheckpointError("in none of the plan's stages", field=min(missing), remedy="Name every weight in a stage.")
    return [_Rank(state, plan, rank).state() for rank in range(plan.world_size)]


class _Rank:
    """Cuts one rank's state."""

    def __init__(self, state: CheckpointState, plan: PartitionPlan, rank: int) -> None:
        self.whole, self.plan = state, plan
        self.place = Place(rank, plan.world_size, plan.data_parallel_size, plan.horizontal_parallel_size, plan.zero)
        self.present = set(plan.stages[self.place.stage]) if plan.stages else _everything(state)
        ordered = dict.fromkeys([*plan.order, *state.trainable])
        self.members = [name for name in ordered if name in state.trainable and name in self.present]
        self.windows = self._windows() if self.place.sharded else {}
        declared = state.properties.get(names.MIXED_PRECISION, bool(state.mixed_precision))
        self.mixed = bool(declared) if plan.mixed_precision is None else plan.mixed_precision

    def state(self) -> CheckpointState:
        whole, place = self.whole, self.place
        result = CheckpointState(
            trainable=self.cut({name: whole.trainable[name] for name in self.members}, self.mixed),
            frozen=self.cut({name: value for name, value in whole.frozen.items() if name in self.present}, False),
            mixed_precision=self.cut({name: value for name, value in whole.mixed_precision.items() if name in self.present}, False),
            properties=dict(whole.properties),
        )
        for name, group in whole.optimizer.items():
            result.optimizer[name] = self.group(group)
        result.partitions = dict(self.partitions())
        result.properties |= {
            names.WORLD_RANK: place.rank,
            names.WORLD_SIZE: place.world_size,
            names.DATA_PARALLEL_SIZE: place.data_size,
            names.HORIZONTAL_PARALLEL_SIZE: place.horizontal_size,
            names.ZERO_STAGE: place.zero_stage,
        }
        return result

    def group(self, group: OptimizerGroup) -> OptimizerGroup:
        held = dataclasses.replace(group, states={}, hyperparameters=dict(group.hyperparameters))
        for param, moments in group.states.items():
            if param in self.present and self.owns(param):
                shape = self.whole.parameters[param].shape if param in self.whole.parameters else None
                held.states[param] = {
                    moment: self.piece(param, value, True) if value.shape == shape else value for moment, value in moments.items()
                }
        steps = [int(moments["step"]) if "step" in moments else group.step for moments in held.states.values()]
        if any("step" in moments for moments in held.states.values()) and max(steps) != group.step:  # as if this rank were all there is
            held.step = max(steps)
            for moments, step in zip(held.states.values(), steps, strict=True):
                moments.pop("step", None)
                if step != held.step:
                    moments["step"] = torch.tensor(step)
        return held

    def owns(self, name: str) -> bool:
        """Whether ZeRO left this rank anything of a weight."""
        return not self.place.sharded or name not in self.whole.trainable or name in self.windows

    def cut(self, values: Mapping[str, Value], sharded: bool) -> dict[str, Value]:
        return {name: self.piece(name, value, sharded) for name, value in values.items() if not sharded or self.owns(name)}

    def piece(self, name: str, value: Value, sharded: bool) -> Value:
        """This rank's piece of a tensor of the weight's shape."""
        if is_string(value):
            return value
        part = local_part(value, self.plan.axis(name), self.place.horizontal, self.place.horizontal_size)
        start, stop = self.windows.get(name, (0, part.numel())) if sharded else (0, part.numel())
        if (start, stop) == (0, part.numel()):
            return part
        pieces = [view.reshape(-1) for view, _, _ in stretches(part, start, stop)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def partitions(self) -> Iterator[tuple[str, PartitionInfo]]:
        """As in ORT: what Megatron cut is listed on every rank, what ZeRO cut where there is a piece."""
        for name, value in self.whole.parameters.items():
            if name not in self.present or is_string(value):
                continue
            start, stop = self.windows.get(name, (0, 0))
            local = math.prod(local_shape(value.shape, self.plan.axis(name), self.place.horizontal_size, name))
            if self.plan.axis(name) != WHOLE or 0 < stop - start < local:
                yield name, PartitionInfo(tuple(value.shape), self.plan.axis(name))

    def _windows(self) -> dict[str, tuple[int, int]]:
        """For each trainable weight of which this rank has something, the range of its (local) elements."""
        sizes = {}
        for name in self.members:
            if is_string(self.whole.trainable[name]):
                raise CheckpointError("a trainable string tensor can't be cut", field=name)
            shape = local_shape(self.whole.trainable[name].shape, self.plan.axis(name), self.place.horizontal_size, name)
            sizes[name] = math.prod(shape)
        stretch = zero_stretch(sum(sizes.values()), self.place.data_size)
        first = self.place.data * stretch
        windows, position = {}, 0
        for name, size in sizes.items():
            start, stop = max(first - position, 0), min(first + stretch - position, size)
            if start < stop or (size == 0 and first <= position < first + stretch):
                windows[name] = start, stop
            position += size
        return windows


def zero_stretch(total: int, ranks: int) -> int:
    """Elements that each of the ranks gets of `total`."""
    return (total // (PADDING * ranks) + 1) * PADDING


def _everything(state: CheckpointState) -> set[str]:
    return {*state.trainable, *state.frozen, *state.mixed_precision}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
