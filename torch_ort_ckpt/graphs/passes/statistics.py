"""BatchNorm's running statistics: updated in the order of the calls, and with the unbiased variance that PyTorch keeps."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.shape_inference

from ..description import all_nodes, attributes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchNorm:
    """A BatchNormalization of the training graph: the names of its result and of its running statistics."""

    output: str
    mean: str
    variance: str
    momentum: float


def batch_norms(model: onnx.ModelProto) -> list[BatchNorm]:
    """The BatchNorms whose running statistics the training graph updates, in its order. A layer used twice is there twice."""
    found = []
    roots = {value.name: value.name for value in model.graph.input}
    for node in model.graph.node:
        if node.op_type == "Identity" and node.input[0] in roots:  # how the second use of a layer comes by its statistics
            roots[node.output[0]] = roots[node.input[0]]
        if _trains_statistics(node) and node.input[3] in roots and node.input[4] in roots:
            mean, variance = roots[node.input[3]], roots[node.input[4]]
            roots |= dict(zip(node.output[1:3], (mean, variance), strict=False))  # the next use of the layer continues from there
            found.append(BatchNorm(node.output[0], mean, variance, float(attributes(node).get("momentum", 0.9))))
    return found


def shares_statistics(model: onnx.ModelProto) -> bool:
    """Whether a BatchNorm is used more than once."""
    means = [norm.mean for norm in batch_norms(model)]
    return len(set(means)) < len(means)


def chain_statistics(model: onnx.ModelProto, evaluation: onnx.ModelProto | None) -> None:
    """Let every further use of a BatchNorm continue from the running statistics of the previous use (in place).

    A training graph does not show which use that is: ORT's gradient builder reorders its nodes. It keeps the eval graph
    in the order in which the module called its layers.
    """
    uses: dict[str, list[BatchNorm]] = {}
    for norm in batch_norms(model):
        uses.setdefault(norm.mean, []).append(norm)
    shared = [norms for norms in uses.values() if len(norms) > 1]
    if not shared:
        return
    order = [output for node in (evaluation.graph.node if evaluation is not None else ()) for output in node.output]
    called = {name: place for place, name in enumerate(order)}
    known = all(norm.output in called for norms in shared for norm in norms)
    if not known:
        names = ", ".join(norms[0].mean for norms in shared)
        logger.warning("%s: used more than once, in an order that only an eval graph shows; the order of the node names is used", names)
    for norms in shared:
        _link(model, sorted(norms, key=lambda norm: [("", called[norm.output])] if known else _by_number(norm.output)))
    ordered = _topological(model.graph)
    if len(ordered) < len(model.graph.node):  # the names are misleading: one use computes what an earlier one by name reads
        for norms in shared:
            _link(model, norms)
        ordered = _topological(model.graph)
    del model.graph.node[:]
    model.graph.node.extend(ordered)


def _link(model: onnx.ModelProto, norms: list[BatchNorm]) -> None:
    """Let the uses of one BatchNorm update its statistics in this order."""
    nodes = {node.output[0]: node for node in model.graph.node if node.output}
    latest = [norms[0].mean, norms[0].variance]
    for norm in norms:
        node = nodes[norm.output]
        node.input[3], node.input[4] = latest
        while len(node.output) < 3:
            node.output.append("")
        for place in (1, 2):
            node.output[place] = node.output[place] or f"{norm.output}.statistics{place}"
        latest = list(node.output[1:3])


def _by_number(name: str) -> list[tuple[str, int]]:
    """Exporters call the uses of `/block/bn` `/block/bn`, `/block/bn_1`, ..., `/block/bn_10`, or number the values."""
    parts = (part.rpartition("_") for part in name.split("/"))
    return [(stem, int(end)) if mark and end.isdigit() else (stem + mark + end, -1) for stem, mark, end in parts]


def _topological(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes with each after those it reads from, otherwise in their order. Nodes in a cycle are dropped."""
    producers = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    waiting = [0] * len(graph.node)
    readers: list[list[int]] = [[] for _ in graph.node]
    for place, node in enumerate(graph.node):
        for source in {producers[name] for name in reads(node) if name in producers}:
            waiting[place] += 1
            readers[source].append(place)
    ready = [place for place, count in enumerate(waiting) if not count]
    ordered = []
    while ready:
        place = heapq.heappop(ready)
        ordered.append(graph.node[place])
        for reader in readers[place]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    return ordered


def reads(node: onnx.NodeProto) -> Iterable[str]:
    """What a node reads, the bodies of If and Loop too."""
    yield from node.input
    for item in node.attribute:
        for body in [item.g] if item.type == onnx.AttributeProto.GRAPH else item.graphs:
            for inner in all_nodes(body):
                yield from inner.input


def _trains_statistics(node: onnx.NodeProto) -> bool:
    return node.op_type == "BatchNormInternal" or (node.op_type == "BatchNormalization" and bool(attributes(node).get("training_mode")))


def unbias_statistics(model: onnx.ModelProto) -> dict[str, str]:
    """Let the graph compute BatchNorm's running variance as PyTorch does (in place); ORT's CPU kernel uses the biased one.

    With the momentum m and n values per channel, `m*old + (new - m*old) * n/(n-1)`. The kernel overwrites its input, so it gets a copy.
    Returns the outputs that hold the result, by the variances' names.
    """
    graph = model.graph
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    norms = {norm.output: norm for norm in batch_norms(model)}
    latest: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        norm = norms.get(node.output[0])
        if norm is None or len(node.output) < 3 or not node.output[2]:
            nodes.append(node)
            continue
        source, variance = node.input[0], norm.variance
        old = latest.get(variance, variance)
        prefix = f"{node.output[0]}.unbiased"
        momentum, channels, one = f"{prefix}.momentum", f"{prefix}.channels", f"{prefix}.one"
        (size,) = (dim.dim_value for value in graph.input if value.name == variance for dim in value.type.tensor_type.shape.dim)
        kind, double = types[variance], onnx.TensorProto.DOUBLE
        graph.initializer.extend(
            [
                onnx.helper.make_tensor(momentum, kind, [], [norm.momentum]),
                onnx.helper.make_tensor(channels, double, [], [float(size)]),
                onnx.helper.make_tensor(one, double, [], [1.0]),
            ]
        )

        def add(kind: str, *inputs: str, prefix: str = prefix, **settings: Any) -> str:
            output = f"{prefix}.{len(nodes)}"
            nodes.append(onnx.helper.make_node(kind, inputs, [output], **settings))
            return output

        node.input[4] = add("Abs", old)  # a copy that no optimization removes; a variance is never negative
        nodes.append(node)
        count = add("Div", add("Cast", add("Size", source), to=double), channels)
        factor = add("Cast", add("Div", count, add("Max", add("Sub", count, one), one)), to=kind)
        kept = add("Mul", old, momentum)
        latest[variance] = add("Add", kept, add("Mul", add("Sub", node.output[2], kept), factor))
    del graph.node[:]
    graph.node.extend(nodes)
    graph.output.extend(onnx.helper.make_tensor_value_info(output, types[name], None) for name, output in latest.items())
    return latest
