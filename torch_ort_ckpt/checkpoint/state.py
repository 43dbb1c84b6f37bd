"""`CheckpointState`: the one in-memory form of a training state, used by every format and every engine.

Plain data with torch tensors inside. Nothing here copies a tensor; call `clone()` for a private copy.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch

from ..dtypes import HALF_SUFFIXES, short_name
from ..errors import CheckpointError, printable
from ..storage.tensors import byte_view, same_bytes
from .notebook import html_table

Value: TypeAlias = Any
"""A `torch.Tensor`, or a numpy object array for string tensors (PyTorch has none)."""

DEFAULT_LR = 0.001
"""The rate ORT starts with, and resets to after loading."""


@dataclass(eq=False)
class OptimizerGroup:
    """One parameter group: `states` maps parameter name -> moment name -> tensor.

    Moments are `momentum0`, `momentum1` whatever the file calls them; a per-weight step that differs from the group's is
    `states[param]["step"]`. `lr` is the current rate where known (ORT's own files never hold it); `hyperparameters` uses PyTorch's
    names (`betas`, `eps`, `weight_decay`, ...), with `OptimizerSpec.beyond_torch` beside them, and is empty where the source has none.
    """

    step: int = 0
    initial_lr: float = DEFAULT_LR
    lr: float | None = None
    states: dict[str, dict[str, Value]] = field(default_factory=dict)
    hyperparameters: dict[str, Any] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OptimizerGroup):
            return NotImplemented
        return (
            self.step == other.step
            and same_number(self.initial_lr, other.initial_lr)
            and same_number(self.lr, other.lr)
            and self.hyperparameters == other.hyperparameters
            and self.states.keys() == other.states.keys()
            and all(same_tensors(states, other.states[name]) for name, states in self.states.items())
        )

    def __repr__(self) -> str:
        moments = sorted({moment for states in self.states.values() for moment in states})
        rate = f", lr={self.lr:g}" if self.lr is not None else ""
        return f"OptimizerGroup(step={self.step}{rate}, {len(self.states)} parameters, moments={moments})"


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer a graph runs, with PyTorch's names for its hyper-parameters."""

    kind: str = "AdamW"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    adam_mode: int = 0
    correct_bias: bool = True
    max_norm: float | None = None
    momentum: float = 0.0
    nesterov: bool = False
    """SGD's; ORT's own kernel has neither, a step model has both."""
    known: bool = True
    """False for a `.ort` graph: it runs with its own hyper-parameters, which can't be read."""

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """As in a parameter group of `torch.optim`."""
        if self.kind == "SGD":
            return {"momentum": self.momentum, "dampening": 0.0, "weight_decay": self.weight_decay, "nesterov": self.nesterov}
        return {"betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay, "decoupled_weight_decay": self.kind != "Adam"}

    @property
    def beyond_torch(self) -> dict[str, Any]:
        """What the graph does and the optimizer of this name in `torch.optim` does not."""
        found: dict[str, Any] = {"adam_mode": 1} if self.adam_mode else {}
        found |= {} if self.correct_bias else {"correct_bias": False}
        return found | ({} if self.max_norm is None else {"max_norm": self.max_norm})

    @property
    def moments(self) -> int:
        """How many moment tensors a checkpoint keeps per parameter (SGD keeps one of zeros)."""
        return 2 if self.kind in ("AdamW", "Adam") else 1


@dataclass(frozen=True)
class PartitionInfo:
    """How one rank's piece of a weight relates to the whole.

    `original_dim` is the shape of the whole weight, before Megatron cut it and ZeRO flattened the pieces; `megatron_row_partition` is
    ORT's number: -1 not cut, 0 by columns (last axis), 1 by rows (axis 0). Which rank this is, the state's properties say.
    """

    original_dim: tuple[int, ...]
    megatron_row_partition: int = -1


@dataclass(eq=False, repr=False)
class CheckpointState:
    """Parameters, optimizer groups and properties of one training run, as ORT or PyTorch left them.

    Reads like a mapping of its parameters, trainable ones first: `state["fc.weight"]`, `in`, `len`, `keys()`, `items()`.
    """

    trainable: dict[str, Value] = field(default_factory=dict)
    frozen: dict[str, Value] = field(default_factory=dict)
    optimizer: dict[str, OptimizerGroup] = field(default_factory=dict)
    properties: dict[str, int | float | str] = field(default_factory=dict)
    mixed_precision: dict[str, torch.Tensor] = field(default_factory=dict)
    partitions: dict[str, PartitionInfo] = field(default_factory=dict)
    nominal: bool = False
    format_version: int | None = None
    _buffers: tuple[Any, ...] = field(default=(), repr=False)  # the mapped files behind the tensors, for streaming

    @property
    def parameters(self) -> Mapping[str, Value]:
        """Trainable and frozen parameters together, read-only."""
        return MappingProxyType({**self.trainable, **self.frozen})

    def __getitem__(self, name: str) -> Value:
        for home in (self.frozen, self.trainable):  # of a name in both, `parameters` has the frozen one
            if name in home:
                return home[name]
        raise KeyError(f"no parameter named {name!r}{did_you_mean(name, self.parameters)}")

    def __contains__(self, name: object) -> bool:
        return name in self.trainable or name in self.frozen

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __bool__(self) -> bool:
        return True  # a state without parameters is still a state: `if state:` asks whether there is one

    def keys(self) -> KeysView[str]:
        """Names of all parameters."""
        return self.parameters.keys()

    def items(self) -> ItemsView[str, Value]:
        """Names and values of all parameters."""
        return self.parameters.items()

    @property
    def step(self) -> int:
        """Completed optimizer steps (of the group that is furthest along)."""
        return max((group.step for group in self.optimizer.values()), default=0)

    def require_values(self) -> None:
        """Raise for a nominal state if values are needed."""
        if self.nominal:
            raise CheckpointError(
                "the checkpoint is nominal: it has no values",
                remedy="Load the complete one, or complete it: toc.from_torch(..., like=state).",
            )

    def tensors(self) -> Iterator[tuple[str, Value]]:
        """Every tensor with its label: `trainable/<w>`, `frozen/<w>`, `mixed_precision/<w>` or `optimizer/<group>/<w>/<moment>`."""
        for kind in ("trainable", "frozen", "mixed_precision"):
            for name, value in getattr(self, kind).items():
                yield f"{kind}/{name}", value
        for group_name, group in self.optimizer.items():
            for name, states in group.states.items():
                for moment, value in states.items():
                    yield f"optimizer/{group_name}/{name}/{moment}", value

    def clone(self) -> CheckpointState:
        """A deep copy: safe to keep when the file is overwritten in place or training continues."""
        return self.copied_by(lambda value: value.detach().clone())

    def copied_by(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> CheckpointState:
        """A deep copy with this copy of each tensor. It is called once for each: tied tensors stay tied."""
        copied: dict[int, Value] = {}

        def one(value: Value) -> Value:
            if id(value) not in copied:
                copied[id(value)] = value.copy() if isinstance(value, np.ndarray) else copy(value)
            return copied[id(value)]

        def many(values: Mapping[str, Value]) -> dict[str, Value]:
            return {name: one(value) for name, value in values.items()}

        groups = {
            name: OptimizerGroup(
                group.step,
                group.initial_lr,
                group.lr,
                {param: many(states) for param, states in group.states.items()},
                dict(group.hyperparameters),
            )
            for name, group in self.optimizer.items()
        }
        return CheckpointState(
            trainable=many(self.trainable),
            frozen=many(self.frozen),
            optimizer=groups,
            properties=dict(self.properties),
            mixed_precision=many(self.mixed_precision),
            partitions=dict(self.partitions),
            nominal=self.nominal,
            format_version=self.format_version,
        )

    def set_parameter(self, name: str, value: Value) -> None:
        """Replace one parameter; its half-precision alias, if it has one, follows."""
        home = self.trainable if name in self.trainable else self.frozen
        if name not in home:
            raise CheckpointError(f"no parameter named {name!r}", field=name, remedy="Add new ones to .trainable or .frozen.")
        home[name] = value
        if name in self.mixed_precision:
            self.mixed_precision[name] = value.to(self.mixed_precision[name].dtype)

    def stale_aliases(self) -> list[str]:
        """Weights whose half-precision alias differs from the rounded master (a shard of a master is not compared)."""
        masters = {name: value for name, value in self.parameters.items() if name not in self.partitions}
        return [name for name, alias in self.mixed_precision.items() if name in masters and not alias_agrees(masters[name], alias)]

    def refresh_mixed_precision(self) -> list[str]:
        """Recompute the aliases that disagree with their masters (the masters are the truth); returns their names."""
        stale = self.stale_aliases()
        for name in stale:
            if is_string(self.parameters[name]):
                raise CheckpointError("a half-precision alias of a string tensor", field=f"mixed_precision/{name}", remedy="Remove it.")
            self.mixed_precision[name] = self.parameters[name].to(self.mixed_precision[name].dtype)
        return stale

    def promote_half(self) -> list[str]:
        """Give every weight that exists only in half precision (`<w>_fp16` without `<w>`) an fp32 master; returns the new names."""
        promoted = []
        for home in (self.trainable, self.frozen):
            for name in list(home):
                base, dtype = split_half_suffix(name)
                if dtype is None or is_string(home[name]) or home[name].dtype != dtype or base in self.parameters:
                    continue
                half = home.pop(name)
                home[base] = half.to(torch.float32)
                self.mixed_precision[base] = half
                promoted.append(base)
        return promoted

    def __eq__(self, other: object) -> bool:
        """Same content bit for bit (NaN equals NaN of the same bits); its origin (`format_version`) is ignored."""
        if not isinstance(other, CheckpointState):
            return NotImplemented
        return (
            self.nominal == other.nominal
            and same_tensors(self.trainable, other.trainable)
            and same_tensors(self.frozen, other.frozen)
            and same_tensors(self.mixed_precision, other.mixed_precision)
            and self.optimizer == other.optimizer
            and self.partitions == other.partitions
            and self.properties.keys() == other.properties.keys()
            and all(same_number(value, other.properties[name]) for name, value in self.properties.items())
        )

    __hash__ = None  # type: ignore[assignment]  # mutable, compared by content

    def __repr__(self) -> str:
        parts = [
            f"{len(self.trainable)} trainable ({format_bytes(_total(self.trainable))})",
            f"{len(self.frozen)} frozen ({format_bytes(_total(self.frozen))})",
        ]
        if self.mixed_precision:
            parts.append(f"{len(self.mixed_precision)} half-precision aliases")
        for name, group in self.optimizer.items():
            size = sum(_total(states) for states in group.states.values())
            parts.append(f"{printable(name)}: step {group.step}, {len(group.states)} states ({format_bytes(size)})")
        parts.append(f"{len(self.properties)} properties")
        if self.partitions:
            parts.append(f"{len(self.partitions)} partitioned")
        if self.nominal:
            parts.append("nominal")
        return f"CheckpointState({', '.join(parts)})"

    def _repr_html_(self) -> str:
        rows = [
            (name, kind, "string" if is_string(value) else short_name(value.dtype), tuple(value.shape), format_bytes(nbytes(value)))
            for kind, values in (("trainable", self.trainable), ("frozen", self.frozen))
            for name, value in values.items()
        ]
        return html_table(repr(self), ("name", "kind", "dtype", "shape", "size"), rows)


def is_string(value: Value) -> bool:
    """Whether this is a string tensor (a numpy object array)."""
    return isinstance(value, np.ndarray)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """` (did you mean 'fc.weight'?)` with up to three of the known names that are close to this one, or an empty string."""
    near = difflib.get_close_matches(name, known, n=3) if isinstance(name, str) else []
    return f" (did you mean {' or '.join(repr(printable(other)) for other in near)}?)" if near else ""


def split_half_suffix(name: str) -> tuple[str, torch.dtype | None]:
    """`("w", torch.float16)` for `w_fp16`; `(name, None)` for a name without such a suffix."""
    for suffix, dtype in HALF_SUFFIXES.items():
        if name.endswith(suffix) and len(name) > len(suffix):
            return name[: -len(suffix)], dtype
    return name, None


def alias_name(name: str, alias: torch.Tensor) -> str:
    """The name ORT gives this alias: `<w>_fp16` or `<w>_bf16`."""
    for suffix, dtype in HALF_SUFFIXES.items():
        if alias.dtype == dtype:
            return name + suffix
    raise CheckpointError(
        f"a half-precision alias must be float16 or bfloat16, this one is {short_name(alias.dtype)}",
        field=name,
        remedy="Convert it with .half() or .bfloat16().",
    )


def alias_agrees(master: Value, alias: torch.Tensor) -> bool:
    """Whether `alias` equals the rounded `master` (any NaN equals any NaN)."""
    if is_string(master) or master.shape != alias.shape:
        return False
    if master.is_meta or alias.is_meta:
        return True
    rounded = master.to(alias.dtype)
    return bool(((rounded.view(torch.int16) == alias.view(torch.int16)) | (rounded.isnan() & alias.isnan())).all())


def same_number(a: Any, b: Any) -> bool:
    """Equal in type and value; NaN equals NaN, and 0.0 is not -0.0."""
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    return type(a) is type(b) and bool(a == b)


def same_tensor(a: Value, b: Value) -> bool:
    """Equal in dtype, shape and every bit."""
    if a is b:
        return True
    if is_string(a) or is_string(b):
        return is_string(a) and is_string(b) and a.shape == b.shape and a.tolist() == b.tolist()
    if a.dtype != b.dtype or a.shape != b.shape or a.is_meta != b.is_meta:
        return False
    if a.is_meta or a.numel() == 0:
        return True
    return same_bytes(byte_view(a.cpu()), byte_view(b.cpu()))


def same_ends(a: torch.Tensor, b: Value) -> bool:
    """Equal in dtype and shape, and in the first and last bytes."""
    if is_string(b) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    first, second = byte_view(a), byte_view(b)
    return same_bytes(first[:_END], second[:_END]) and same_bytes(first[-_END:], second[-_END:])


_END = 4096


def same_tensors(a: Mapping[str, Value], b: Mapping[str, Value]) -> bool:
    return a.keys() == b.keys() and all(same_tensor(value, b[name]) for name, value in a.items())


def nbytes(value: Value) -> int:
    """Size of the tensor's elements; for string tensors of their UTF-8 text."""
    if is_string(value):
        return sum(_text_size(str(text)) for text in value.reshape(-1).tolist())
    return 0 if value.is_meta else int(value.numel() * value.element_size())


def _text_size(text: str) -> int:
    try:
        return len(text.encode("utf-8", "surrogateescape"))  # bytes that were not UTF-8 count as they were
    except UnicodeEncodeError:
        return len(text.encode("utf-8", "surrogatepass"))


def format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def _total(values: Mapping[str, Value]) -> int:
    return sum(nbytes(value) for value in values.values())
