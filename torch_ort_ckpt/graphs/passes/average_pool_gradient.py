"""AveragePoolGrad of ORT 1.19.2, which crashes or is wrong for many pools.

It takes its shape from the graph, the batch too, which therefore must be fixed; it ignores `auto_pad` and dilations; the three-dimensional
one does not sum windows that overlap, and mixes up its axes. Such a node becomes a transposed convolution of each channel with ones, after
the gradient is divided by the size of each window. Where height, width or channels are unknown it stays, and `limits.py` refuses it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from ..description import attributes
from ..shapes import Shape, fixed, shapes
from .padding_amounts import automatic_pads
from .rewriting import NewNodes, replace_nodes


def rewrite_average_pool_gradients(model: onnx.ModelProto) -> int:
    known = shapes(model)
    return replace_nodes(model, lambda node: _rewritten(node, known.get(node.output[0])) if node.op_type == "AveragePoolGrad" else None)


def _rewritten(node: onnx.NodeProto, shape: Shape | None) -> NewNodes | None:
    known = fixed(shape[1:]) if shape else None
    if shape is None or known is None:
        return None
    settings = attributes(node)
    kernel, rank = list(settings["kernel_shape"]), len(known) - 1
    strides, dilations = settings.get("strides") or [1] * rank, settings.get("dilations") or [1] * rank
    kind = settings.get("auto_pad", b"NOTSET").decode()
    if shape[0] is not None and rank < 3 and kind == "NOTSET" and set(dilations) == {1}:
        return None  # the kernel is right
    channels, *size = known
    pads = settings.get("pads") or [0] * (2 * rank)
    if kind != "NOTSET":
        pads = automatic_pads(size, kernel, strides, dilations, kind)
    counts, trim, extra = np.ones([1, 1]), [], []
    for axis in range(rank):
        window = (kernel[axis] - 1) * dilations[axis] + 1
        room = size[axis] + pads[axis] + pads[rank + axis] - window
        windows = (-(-room // strides[axis]) if settings.get("ceil_mode") else room // strides[axis]) + 1
        starts = np.arange(windows)[:, None] * strides[axis] - pads[axis] + np.arange(kernel[axis]) * dilations[axis]
        inside = ((starts >= 0) & (starts < size[axis])).sum(1)
        counts = counts[..., None] * (np.full(windows, kernel[axis]) if settings.get("count_include_pad") else inside)
        beyond = (windows - 1) * strides[axis] + window - pads[axis] - size[axis]
        trim.append(max(beyond, 0))
        extra.append(max(-beyond, 0))
    new = NewNodes(f"{node.output[0]}.rewritten")
    scaled = new.add("Mul", node.input[0], new.constant(1 / counts, np.float32))
    ones = new.constant(np.ones([channels, 1, *kernel]), np.float32)
    transposed: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "group": channels}
    transposed |= {"pads": [*pads[:rank], *trim], "output_padding": extra}
    new.add("ConvTranspose", scaled, ones, output=node.output[0], **transposed)
    return new
