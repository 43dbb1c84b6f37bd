"""Operators that ONNX has no translation for, written as plain PyTorch functions, one file for each subject.

table = {**core_table, **batch_norm_entries, **after_autograd()}   # without dropped()
with before_autograd():
    ...  # trace the joint graph with that table

`while_exporting()` is to be open around `torch.export.export`. `after_autograd(optimize=True, otherwise=core_table)` has faster forms (the
files `fast_*.py`) of some of them.
"""

from __future__ import annotations

# Importing a subject enters its functions into the tables.
from . import (
    activations,
    convolution,
    copying,
    ctc,
    cumulative,
    distances,
    embedding,
    fast_convolution,
    fast_elementwise,
    fast_losses,
    fast_norms,
    fast_pooling,
    fourier,
    indexing,
    linalg,
    losses,
    norms,
    padding,
    pooling,
    pooling_adaptive,
    resize,
    sampling,
    special,
)
from .private import OpOverload
from .registry import after_autograd, before_autograd, register_decomposition, while_exporting

__all__ = ["after_autograd", "before_autograd", "dropped", "register_decomposition", "while_exporting"]

SUBJECTS = (
    activations, convolution, copying, ctc, cumulative, distances, embedding, fourier, indexing, linalg, losses, norms,
    padding, pooling, pooling_adaptive, resize, sampling, special,
    fast_convolution, fast_elementwise, fast_losses, fast_norms, fast_pooling,
)  # fmt: skip


def dropped() -> set[OpOverload]:
    """Entries of PyTorch's core table to leave out: ONNX has a better translation of the operator itself."""
    return set()
