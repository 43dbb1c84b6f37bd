"""Half-precision aliases: `<w>_fp16` and `<w>_bf16` entries beside `<w>`."""

from __future__ import annotations

import os
from typing import Any

from .errors import CheckpointError
from .properties import WORLD_RANK
from .state import CheckpointState, Value, alias_name, is_string, split_half_suffix


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
    """The aliases under the names they have on disk; refuses one that would take another weight's name."""
    taken = state.parameters
    named = {}
    for name, alias in state.mixed_precision.items():
        full = alias_name(name, alias)
        if full in taken:
            raise CheckpointError(f"the alias of {name!r} and a weight are both called {full!r}", field=full)
        named[full] = alias
    return named


def check_aliases(state: CheckpointState, path: str | os.PathLike[str] | None = None) -> None:
    """Raise if an alias disagrees with its master."""
    if stale := state.stale_aliases():
        raise CheckpointError(
            f"the half-precision aliases of {len(stale)} weights are not what their masters round to: {', '.join(stale[:5])}",
            path=path,
            field=f"mixed_precision/{stale[0]}",
            remedy="Load without strict and call state.refresh_mixed_precision().",
        )


def _is_alias(value: Value, master: Value, dtype: Any) -> bool:
    if is_string(value) or is_string(master):
        return False
    full = master.is_floating_point() and master.element_size() >= 4
    return bool(full and value.dtype == dtype and value.shape == master.shape)
