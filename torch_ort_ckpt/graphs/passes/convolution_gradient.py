"""ConvGrad of ORT 1.19.2, which is wrong in two cases.

- One- and three-dimensional convolutions in groups: for every group the kernel clears memory for all of them, and so writes zeros past
  the end of the result. (Whether that overwrites another gradient, the loss or nothing depends on the memory plan.) One-dimensional ones
  become two-dimensional, three-dimensional ones are computed group by group.
- The kernel ignores `auto_pad`: the padding is written out.

Where a weight's shape or a padded size is unknown the node stays, and `limits.py` refuses it.
"""

from __future__ import annotations

from typing import Any

import onnx

from ..description import attributes, standard_opset
from ..shapes import fixed, shapes
from .padding_amounts import automatic_pads
from .rewriting import NewNodes, replace_nodes


def rewrite_convolution_gradients(model: onnx.ModelProto) -> int:
    if all(node.op_type != "ConvGrad" for node in model.graph.node):
        return 0
    known, opset = shapes(model), standard_opset(model)

    def rewrite(node: onnx.NodeProto) -> NewNodes | None:
        weight = fixed(known.get(node.input[2])) if node.op_type == "ConvGrad" else None
        if weight is None:
            return None
        rank = len(weight) - 2
        settings: dict[str, Any] = {"strides": [1] * rank, "dilations": [1] * rank, "group": 1} | attributes(node)
        kind = settings.pop("auto_pad", b"NOTSET").decode()
        size = fixed((known.get(node.input[1]) or (None, None, None))[2:])
        padded = kind.startswith("SAME") and size is not None
        if size is not None and padded:
            settings["pads"] = automatic_pads(size, weight[2:], settings["strides"], settings["dilations"], kind)
        settings["pads"] = settings.get("pads") or [0] * (2 * rank)
        settings["kernel_shape"] = list(weight[2:])
        if kind.startswith("SAME") and not padded:
            return None
        if settings["group"] > 1 and rank == 1:
            return _as_two_dimensional(node, settings)
        if settings["group"] > 1 and rank != 2:
            return _group_by_group(node, settings, weight, opset)
        return _with_settings(node, settings) if padded else None

    return replace_nodes(model, rewrite)


def _with_settings(node: onnx.NodeProto, settings: dict[str, Any]) -> NewNodes:
    new = _new(node)
    new.add_several("ConvGrad", node.input, node.output, domain=node.domain, name=node.name, **settings)
    return new


def _as_two_dimensional(node: onnx.NodeProto, settings: dict[str, Any]) -> NewNodes:
    new = _new(node)
    inputs = [new.add("Reshape", name, new.constant([0, 0, 1, -1])) for name in node.input]
    # A bias (output 2) has no such axis.
    outputs = [name if place == 2 or not name else f"{new.prefix}.output{place}" for place, name in enumerate(node.output)]
    before, after = settings["pads"]
    changed = settings | {"pads": [0, before, 0, after]}
    changed |= {key: [1, *settings[key]] for key in ("kernel_shape", "strides", "dilations")}
    new.add_several("ConvGrad", inputs, outputs, domain=node.domain, name=node.name, **changed)
    for name, wide in zip(node.output, outputs, strict=True):
        if name != wide:
            new.add("Reshape", wide, new.constant([0, 0, -1]), output=name)
    return new


def _group_by_group(node: onnx.NodeProto, settings: dict[str, Any], weight: tuple[int, ...], opset: int) -> NewNodes:
    new = _new(node)
    groups = range(settings["group"])
    count = weight[0] // len(groups)
    for place, (source, axis, size) in enumerate(zip(node.input, (1, 1, 0), (count, weight[1], count), strict=True)):
        parts, sizes = [f"{new.prefix}.group{group}.input{place}" for group in groups], [size] * len(groups)
        if opset < 13:
            new.add_several("Split", [source], parts, axis=axis, split=sizes)
        else:
            new.add_several("Split", [source, new.constant(sizes)], parts, axis=axis)
    for group in groups:
        start = f"{new.prefix}.group{group}"
        inputs = [f"{start}.input{place}" for place in range(3)]
        outputs = [f"{start}.output{place}" if name else "" for place, name in enumerate(node.output)]
        new.add_several("ConvGrad", inputs, outputs, domain=node.domain, name=start, **(settings | {"group": 1}))
    for place, (name, axis) in enumerate(zip(node.output, (1, 0, 0), strict=False)):
        if name:
            new.add("Concat", *(f"{new.prefix}.group{group}.output{place}" for group in groups), output=name, axis=axis)
    return new


def _new(node: onnx.NodeProto) -> NewNodes:
    return NewNodes(f"{next(filter(None, node.output))}.rewritten")
