"""A BatchNorm that a module uses more than once: every use continues from the running statistics of the previous one.

ORT's training graphs start each use from the same statistics, so all but one update are lost, and they do not show which use came first:
ORT's gradient builder reorders the nodes. It keeps the eval graph in the order in which the module called its layers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import onnx

from ...errors import CorruptFileError
from ..batch_norms import BatchNorm, batch_norms
from .onnx_ir_models import as_ir, as_proto
from .rewriting import set_items

if TYPE_CHECKING:
    import onnx_ir as ir

logger = logging.getLogger(__name__)


def chain_statistics(model: onnx.ModelProto, evaluation: onnx.ModelProto | None) -> int:
    """`evaluation`: the eval graph. Without it (or where it lacks the layers) the order of the node names is used."""
    uses: dict[str, list[BatchNorm]] = {}
    for norm in batch_norms(model):
        uses.setdefault(norm.mean, []).append(norm)
    shared = [norms for norms in uses.values() if len(norms) > 1]
    if not shared:
        return 0
    order = [output for node in (evaluation.graph.node if evaluation is not None else ()) for output in node.output]
    called = {name: place for place, name in enumerate(order)}
    known = all(norm.output in called for norms in shared for norm in norms)
    if not known:
        names = ", ".join(norms[0].mean for norms in shared)
        logger.warning("%s: used more than once, in an order that only an eval graph shows; the order of the node names is used", names)
    changed = as_ir(model)
    for norms in shared:
        _link(changed.graph, sorted(norms, key=lambda norm: [("", called[norm.output])] if known else _by_number(norm.output)))
    if not _sort(changed.graph):  # the names are misleading: one use computes what an earlier one by name reads
        for norms in shared:
            _link(changed.graph, norms)
        if not _sort(changed.graph):
            raise CorruptFileError("the nodes of the training graph form a cycle", remedy="Export it again.")
    set_items(model.graph.node, as_proto(changed).graph.node)
    return sum(map(len, shared))


def _link(graph: ir.Graph, norms: list[BatchNorm]) -> None:
    """Let the uses of one BatchNorm update its statistics in this order."""
    nodes = {node.outputs[0].name: node for node in graph if node.outputs}
    inputs = {value.name: value for value in graph.inputs}
    latest = [inputs[norms[0].mean], inputs[norms[0].variance]]
    for norm in norms:
        node = nodes[norm.output]
        for place, value in zip((3, 4), latest, strict=True):
            node.replace_input_with(place, value)
        node.resize_outputs(max(3, len(node.outputs)))
        latest = list(node.outputs[1:3])
        for place, value in enumerate(latest, 1):
            value.name = value.name or f"{norm.output}.statistics{place}"


def _sort(graph: ir.Graph) -> bool:
    """Put every node after those it reads from, otherwise in their order. False if there is a cycle."""
    try:
        graph.sort()
    except ValueError:
        return False
    return True


def _by_number(name: str) -> list[tuple[str, int]]:
    """Exporters call the uses of `/block/bn` `/block/bn`, `/block/bn_1`, ..., `/block/bn_10`, or number the values."""
    parts = (part.rpartition("_") for part in name.split("/"))
    return [(stem, int(end)) if mark and end.isdigit() else (stem + mark + end, -1) for stem, mark, end in parts]
