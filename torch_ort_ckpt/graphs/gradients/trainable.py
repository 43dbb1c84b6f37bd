"""Which parameters of a module are trained."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from torch import nn

from ...errors import CheckpointError


def trainable_names(module: nn.Module, frozen: Iterable[str]) -> list[str]:
    """The parameters that require a gradient and match no pattern of `frozen`."""
    parameters = dict(module.named_parameters())
    patterns = [frozen] if isinstance(frozen, str) else list(frozen)
    for pattern in patterns:
        if not fnmatch.filter(parameters, pattern):
            raise CheckpointError(f"frozen={pattern!r} matches no parameter", remedy=f"There are: {', '.join(list(parameters)[:8])} ...")
    chosen = [
        name
        for name, parameter in parameters.items()
        if parameter.requires_grad and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if not chosen:
        raise CheckpointError("no parameter is left to train", remedy="Freeze fewer.")
    return chosen
