"""The eval graph: the same module and loss in eval mode, decomposed but not differentiated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.export import ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...errors import UnsupportedError
from . import decompositions
from .capture import TRACING_ERRORS, Captured, Dynamic, capture, quiet
from .joint import table
from .where import first_line, line_of_error
from .with_loss import WithLoss


def evaluation_program(wrapped: WithLoss, values: Sequence[torch.Tensor], dynamic: Dynamic) -> tuple[Captured, ExportedProgram]:
    """The captured program and the decomposed one, of a module that is in eval mode."""
    with torch.no_grad():
        captured = capture(wrapped, values, dynamic)
        with quiet(), sdpa_kernel(SDPBackend.MATH), decompositions.before_autograd():
            try:
                return captured, captured.program.run_decompositions(table())
            except TRACING_ERRORS as error:
                raise UnsupportedError(
                    f"PyTorch can't decompose the eval graph ({first_line(error)})",
                    field=line_of_error(error),
                    remedy="Replace the operator in the module, or register a decomposition: torch_ort_ckpt.register_decomposition.",
                ) from error
