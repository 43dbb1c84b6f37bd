"""Random masks as ONNX Dropout: the one random operator of ONNX Runtime that follows `onnxruntime.set_seed` at every run."""

from __future__ import annotations

from typing import Any

import torch

from .private_export import Table

aten = torch.ops.aten


def random_table() -> Table:
    """Decompositions of the random operators behind Dropout1d to Dropout3d, AlphaDropout and FeatureAlphaDropout."""
    return {aten.bernoulli.p: bernoulli}


def bernoulli(x: torch.Tensor, p: float, *, generator: Any = None) -> torch.Tensor:
    """Ones with probability `p`: the mask of a dropout that keeps so many."""
    if not 0.0 < p < 1.0:
        return torch.full_like(x, float(p >= 1.0))
    mask: torch.Tensor = aten.native_dropout(torch.ones_like(x, dtype=torch.float32), 1.0 - p, True)[1]
    return mask.to(x.dtype)
