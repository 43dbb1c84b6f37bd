"""Names: `NameMap` between what ORT calls a weight and what PyTorch calls it, and the half-precision aliases `<w>_fp16` / `<w>_bf16`.

Exporters rename and transpose weights (`onnx::MatMul_12` holds `fc.weight` transposed); wrappers prefix them (`module.`, `_orig_mod.`).
`NameMap.match` finds what belongs together and reports the rest instead of guessing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..storage.paths import PathLike
from ..storage.tensors import memory_key
from .properties import WORLD_RANK
from .state import CheckpointState, Value, alias_name, is_string, same_tensor, split_half_suffix


@dataclass(frozen=True)
class Entry:
    """The ORT name of a PyTorch weight; `transpose` if one is the transpose of the other."""

    ort: str
    transpose: bool = False


@dataclass
class NameMap:
    """PyTorch name -> `Entry`. Several PyTorch names may share one ORT name: tied weights stay tied.

    Names without an entry keep their name. `how` is the basis of each match (name, shape or value); the two `unmatched` tuples are
    what `match` could not match.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)
    unmatched_ort: tuple[str, ...] = ()
    unmatched_torch: tuple[str, ...] = ()
    _owners: dict[str, list[tuple[str, bool]]] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def identity(cls) -> NameMap:
        """Every name is the same on both sides."""
        return cls()

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> NameMap:
        """From `{ort: torch}`; a value may be `(torch, transpose)`, `{"name": torch, "transpose": bool}` or a list of those (ties)."""
        entries: dict[str, Entry] = {}
        for ort, value in mapping.items():
            for name, transpose in _targets(ort, value):
                if name in entries:
                    raise CheckpointError(
                        f"{name!r} is mapped from both {entries[name].ort!r} and {ort!r}", field=name, remedy="Give each PyTorch name once."
                    )
                entries[name] = Entry(ort, transpose)
        return cls(entries)

    @classmethod
    def match(cls, state: CheckpointState, module: nn.Module | Mapping[str, torch.Tensor]) -> NameMap:
        """Find each weight of `module` (or of its state dict) in `state`: by name, then by shape, then by value where it has the values."""
        return _Matcher(state, module).run()

    @property
    def complete(self) -> bool:
        """Whether every name on both sides has its counterpart."""
        return not self.unmatched_ort and not self.unmatched_torch

    def to_torch(self, tensors: Mapping[str, Value]) -> dict[str, Value]:
        """ORT-named tensors under their PyTorch names (transposes are views)."""
        return {name: transposed(value, name) if turned else value for ort, value in tensors.items() for name, turned in self.targets(ort)}

    def targets(self, ort: str) -> list[tuple[str, bool]]:
        """(PyTorch name, whether transposed) of everything an ORT name stands for."""
        if self._owners is None:
            self._owners = {}
            for name, entry in self.entries.items():
                self._owners.setdefault(entry.ort, []).append((name, entry.transpose))
        return self._owners.get(ort, [(ort, False)])

    def to_ort(self, tensors: Mapping[str, Value]) -> dict[str, Value]:
        """PyTorch-named tensors under their ORT names; of tied ones the first name wins."""
        result: dict[str, Value] = {}
        for name, value in tensors.items():
            entry = self.entries.get(name, Entry(name))
            if entry.ort not in result:
                result[entry.ort] = transposed(value, name) if entry.transpose else value
        return result

    def ort_name(self, name: str) -> str:
        """The name in ONNX Runtime of a parameter of PyTorch."""
        return self.entries[name].ort if name in self.entries else name

    def report(self) -> str:
        """What was matched how, and what was not, in a few lines."""
        counts: dict[str, int] = {}
        for reason in self.how.values():
            counts[reason] = counts.get(reason, 0) + 1
        lines = [f"matched {len(self.entries)}: " + (", ".join(f"{count} by {reason}" for reason, count in counts.items()) or "none")]
        lines += [f"not matched in the checkpoint: {name}" for name in self.unmatched_ort]
        lines += [f"not matched in the module: {name}" for name in self.unmatched_torch]
        return "\n".join(lines)


def transposed(value: Value, name: str) -> Value:
    if value.ndim != 2:
        raise CheckpointError(
            f"only matrices can be transposed, this has {value.ndim} dimensions",
            field=name,
            remedy='Leave "transpose" out for this weight.',
        )
    return value.T


def plain_name(name: str) -> str:
    """The name without the prefixes of `DataParallel`, DDP and `torch.compile`."""
    name = name.replace("_orig_mod.", "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def of_module(tensors: dict[str, torch.Tensor], module: nn.Module, trained: set[str]) -> dict[str, torch.Tensor]:
    """What the module has, under its own names (a wrapper's prefix included)."""
    own = {plain_name(name): name for name in module.state_dict(keep_vars=True)}
    if lost := sorted(name for name in trained if name in tensors and name not in own):
        raise CheckpointError(
            f"the module has no {', '.join(lost[:5])}, which the checkpoint trained",
            field=lost[0],
            remedy="Pass names=toc.NameMap.match(state, module), or check that the module is the one that was exported.",
        )
    return {own[name]: value for name, value in tensors.items() if name in own}


class _Matcher:
    """The three rounds of `NameMap.match`; each matches what it can and leaves the rest to the next."""

    def __init__(self, state: CheckpointState, module: nn.Module | Mapping[str, torch.Tensor]) -> None:
        tensors = module.state_dict(keep_vars=True) if isinstance(module, nn.Module) else module
        self.ort = {name: value for name, value in state.parameters.items() if not is_string(value)}
        self.strings = [name for name, value in state.parameters.items() if is_string(value)]
        self.linear = _linear_weights(module) if isinstance(module, nn.Module) else set()
        self.twins: dict[str, list[str]] = {}  # first name of a tied set -> all its names
        self.torch: dict[str, torch.Tensor] = {}
        seen: dict[Any, str] = {}
        for name, value in tensors.items():
            first = seen.setdefault(memory_key(value), name)
            self.twins.setdefault(first, []).append(name)
            if first == name:
                self.torch[name] = value
        self.found: dict[str, tuple[Entry, str]] = {}

    def run(self) -> NameMap:
        self.by_name()
        self.by_shape()
        self.by_value()
        entries, how = {}, {}
        for first, (entry, reason) in self.found.items():
            for name in self.twins[first]:
                entries[name], how[name] = entry, reason
        return NameMap(entries, how, tuple(sorted([*self.ort, *self.strings])), tuple(sorted(self.torch)))

    def by_name(self) -> None:
        """Equal names, then names equal up to a prefix on one side; any of a tied set's names counts."""
        for same in (True, False):
            wanted = {plain_name(name): name for name in self.ort}
            for first in list(self.torch):
                twins = [plain_name(twin) for twin in self.twins[first]]
                found = set(twins) & wanted.keys() if same else {own for own in wanted for twin in twins if _tail(twin, own)}
                usable = [name for name in (wanted[own] for own in found) if name in self.ort and self.orientations(name, first)]
                if len(usable) == 1:
                    options = self.orientations(usable[0], first)
                    turned = self.settle_square(usable[0], first) if len(options) == 2 else options[0]
                    self.accept(first, usable[0], bool(turned), "name")

    def by_shape(self) -> None:
        """The only two tensors of their shape and type (a matrix and its transpose count as one shape)."""
        ort_classes, torch_classes = _by_class(self.ort), _by_class(self.torch)
        for key, names in ort_classes.items():
            partners = torch_classes.get(key, [])
            if len(names) != 1 or len(partners) != 1:
                continue
            options = self.orientations(names[0], partners[0])
            turned = options[0] if len(options) == 1 else self.settle_square(names[0], partners[0])
            if turned is not None:
                self.accept(partners[0], names[0], turned, "shape")

    def by_value(self) -> None:
        """Among the rest: equal bits, as long as exactly one pair has them."""
        hits: dict[str, list[tuple[str, bool]]] = {}
        rivals: dict[str, int] = {}
        for key, names in _by_class(self.ort).items():
            for first in _by_class(self.torch).get(key, []):
                for name in names:
                    for turned in self.equal_orientations(name, first)[:1]:
                        hits.setdefault(first, []).append((name, turned))
                        rivals[name] = rivals.get(name, 0) + 1
        for first, options in hits.items():
            if len(options) == 1 and rivals[options[0][0]] == 1:
                self.accept(first, *options[0], "value")

    def orientations(self, ort: str, torch_name: str) -> list[bool]:
        """Whether the shapes allow not transposed (False), transposed (True), or both."""
        a, b = self.ort[ort], self.torch[torch_name]
        if a.is_meta and a.ndim == 0:  # nominal: the shape is not known
            return [False]
        return [False] * (a.shape == b.shape) + [True] * (a.ndim == 2 and b.ndim == 2 and a.shape == b.shape[::-1])

    def equal_orientations(self, ort: str, torch_name: str) -> list[bool]:
        a, b = self.ort[ort], self.torch[torch_name].detach()
        if a.is_meta or b.is_meta or a.numel() == 0:
            return []
        return [turned for turned in self.orientations(ort, torch_name) if same_tensor(a, b.T if turned else b)]

    def settle_square(self, ort: str, torch_name: str) -> bool | None:
        """Whether a square matrix is transposed: by value if possible; else no for the same name, yes for a Linear in a `MatMul`."""
        if equal := self.equal_orientations(ort, torch_name):
            return equal[0]
        plain = plain_name(ort)
        if any(_tail(twin, plain) or twin == plain for twin in map(plain_name, self.twins[torch_name])):
            return False
        return True if "MatMul" in ort and torch_name in self.linear else None

    def accept(self, first: str, ort: str, turned: bool, reason: str) -> None:
        self.found[first] = (Entry(ort, turned), reason)
        del self.torch[first], self.ort[ort]


def _tail(a: str, b: str) -> bool:
    return a.endswith(f".{b}") or b.endswith(f".{a}")


def _by_class(tensors: Mapping[str, torch.Tensor]) -> dict[Any, list[str]]:
    classes: dict[Any, list[str]] = {}
    for name, value in tensors.items():
        shape = tuple(sorted(value.shape)) if value.ndim == 2 else tuple(value.shape)
        classes.setdefault((value.dtype, value.ndim, shape), []).append(name)
    return classes


def _linear_weights(module: nn.Module) -> set[str]:
    return {f"{name}.weight" if name else "weight" for name, child in module.named_modules() if isinstance(child, nn.Linear)}


def _targets(ort: str, value: Any) -> Iterable[tuple[str, bool]]:
    if isinstance(value, str):
        yield value, False
    elif isinstance(value, Mapping) and isinstance(value.get("name"), str):
        yield value["name"], bool(value.get("transpose", False))
    elif isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], bool):
        yield value[0], value[1]
    elif isinstance(value, list):
        for item in value:
            yield from _targets(ort, item)
    else:
        raise CheckpointError(
            "not a target name", field=ort, remedy='Use "torch.name", {"name": "torch.name", "transpose": true} or a list of those.'
        )


# Half-precision aliases


def split_aliases(state: CheckpointState) -> CheckpointState:
    """Move `<w>_fp16` / `<w>_bf16` entries that belong to a full-precision `<w>` into `state.mixed_precision` (in place).

    In a rank of a partitioned set the master may be cut or on another rank: there the name and the type are enough.
    """
    rank = WORLD_RANK in state.properties
    for home in (state.trainable, state.frozen):
        for name in list(home):
            base, dtype = split_half_suffix(name)
            if dtype is None or base in state.mixed_precision:
                continue
            master = state.trainable.get(base, state.frozen.get(base))
            if rank:
                if is_string(home[name]) or home[name].dtype != dtype:
                    continue
            elif master is None or not _is_alias(home[name], master, dtype):
                continue
            state.mixed_precision[base] = home.pop(name)
    return state


def joined_aliases(state: CheckpointState) -> dict[str, Value]:
    """The aliases under their names on disk; raises if one has the name of another weight."""
    taken = state.parameters
    named = {}
    for name, alias in state.mixed_precision.items():
        full = alias_name(name, alias)
        if full in taken:
            raise CheckpointError(f"the alias of {name!r} and a weight are both called {full!r}", field=full, remedy="Rename the weight.")
        named[full] = alias
    return named


def same_aliases(a: CheckpointState, b: CheckpointState) -> bool:
    """Whether two states over the same tensors have the same aliases for the same weights."""
    first, second = a.mixed_precision, b.mixed_precision
    return first.keys() == second.keys() and all(first[name] is alias for name, alias in second.items())


def check_aliases(state: CheckpointState, path: PathLike | None = None) -> None:
    """Raise if an alias disagrees with its master."""
    if stale := state.stale_aliases():
        raise CheckpointError(
            f"the half-precision aliases of {len(stale)} weights differ from their rounded masters: {', '.join(stale[:5])}",
            path=path,
            field=f"mixed_precision/{stale[0]}",
            remedy="Load without strict and call state.refresh_mixed_precision().",
        )


def _is_alias(value: Value, master: Value, dtype: Any) -> bool:
    if is_string(value) or is_string(master):
        return False
    full = master.is_floating_point() and master.element_size() >= 4
    return bool(full and value.dtype == dtype and value.shape == master.shape)
