"""The order in which passes run, for each purpose.

What ORT 1.19.2 computes wrongly after these passes, or crashes on, `limits.py` refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx

from .average_pool_gradient import rewrite_average_pool_gradients
from .cast_like import replace_cast_like
from .convolution_gradient import rewrite_convolution_gradients
from .gradient_buffers import shape_gradient_buffers
from .identity_transpose import remove_identity_transposes
from .instance_norm import decompose_instance_norm
from .kept_dimensions import reduce_without_axes
from .matrix_products import use_gemm
from .max_pool_indices import drop_unused_indices
from .optimizer_flag import declare_flag_boolean
from .optional_outputs import complete_outputs
from .pool_shapes import infer_pool_shapes
from .single_batch_norm_outputs import single_batch_norm_outputs
from .split_gradient import complete_split_gradients
from .transpose_axes import count_axes_from_front
from .transpose_pairs import join_transposes
from .unused_nodes import remove_unused_nodes
from .versions import lower_versions
from .where_gradient import sum_where_gradients

Pass = Callable[[onnx.ModelProto], int]
"""Changes a model in place; returns how many places it changed."""

BEFORE_GRADIENTS: tuple[Pass, ...] = (
    count_axes_from_front,  # first: shape inference fails on such a graph
    complete_outputs,
    replace_cast_like,
    decompose_instance_norm,
    remove_identity_transposes,
    lower_versions,
)
"""What exporters write and ORT's gradient builder can't differentiate or load."""

AFTER_GRADIENTS: tuple[Pass, ...] = (
    shape_gradient_buffers,
    infer_pool_shapes,  # before the gradients of pools, which need their shape
    rewrite_convolution_gradients,
    rewrite_average_pool_gradients,
    complete_split_gradients,
    sum_where_gradients,
)
"""What ORT's gradient builder writes wrongly, or its kernels compute wrongly. Run at the export, and again before a graph is run: graphs
that other tools made need it, and fixed dimensions make more rewrites possible."""

EVALUATION: tuple[Pass, ...] = (single_batch_norm_outputs, lower_versions)
"""What ORT's tools leave in an eval graph."""

OPTIMIZER: tuple[Pass, ...] = (declare_flag_boolean, lower_versions)
"""What keeps ORT 1.19.2 from loading optimizer graphs that other releases, or newer `onnx` packages, made."""

FASTER: tuple[Pass, ...] = (
    drop_unused_indices,
    join_transposes,
    reduce_without_axes,
    use_gemm,
    remove_unused_nodes,  # last: the others leave nodes behind
)
"""What makes a joint graph of PyTorch faster on ONNX Runtime. They need the shapes that PyTorch's exporter declares."""


def apply(model: onnx.ModelProto, passes: Iterable[Pass]) -> list[str]:
    """Run the passes in order; returns what was done, for the log."""
    done = []
    for change in passes:
        if count := change(model):
            done.append(f"{change.__name__} ({count})")
    return done


def repair_forward(model: onnx.ModelProto) -> list[str]:
    """Make an exported forward graph differentiable for ORT (in place)."""
    return apply(model, BEFORE_GRADIENTS)


def repair_training(model: onnx.ModelProto) -> list[str]:
    """Rewrite what ORT computes wrongly in a training graph (in place)."""
    return apply(model, AFTER_GRADIENTS)
