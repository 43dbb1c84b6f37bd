"""Labels out of range, in graphs made by PyTorch: ONNX counts a negative index from the end, so that label -1 would be the last class.

The loss looks up such a label beyond the classes instead, where every runtime refuses it. Labels that are an input of the graph are also
described in its metadata, so that our engines can name the label.
"""

from __future__ import annotations

import json
from typing import Any

import onnx
import torch
from torch import fx
from torch.export import ExportedProgram

from ..description import LABELS
from .private_export import Table, pytorch_table

aten = torch.ops.aten

_FORWARD = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_LOSSES = {
    aten.cross_entropy_loss.default: 4,
    aten.nll_loss_nd.default: 4,
    aten.nll_loss.default: 4,
    aten.nll_loss2d.default: 4,
}
"""Operators of a captured graph that take (scores, labels, ...), and the place of `ignore_index` among their arguments."""
_KEEP_EVERY_LABEL = frozenset(
    {"view", "reshape", "flatten", "to", "_to_copy", "squeeze", "unsqueeze", "transpose", "permute", "contiguous"}
)
_DEFAULT_IGNORED = -100


def refusing_table() -> Table:
    """PyTorch's decompositions of the loss over class indices, with negative labels moved out of range."""
    known = pytorch_table()

    def refusing(operator: Any) -> Any:
        def forward(scores: Any, labels: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
            classes = scores.shape[1 if scores.dim() > 1 else 0]
            wrong = torch.logical_and(labels < 0, labels != ignore_index)
            return known[operator](scores, torch.where(wrong, classes, labels), weight, reduction, ignore_index)

        return forward

    return {operator: refusing(operator) for operator in _FORWARD if operator in known}


def describe_labels(program: ExportedProgram, names: list[str], *models: onnx.ModelProto) -> None:
    """Write into the metadata of the models which of the inputs are labels, of how many classes, and which label is left out."""
    users = [str(name) for name in program.graph_signature.user_inputs]
    found: dict[str, list[int]] = {}
    for node in program.graph.nodes:
        place = _LOSSES.get(node.target) if node.op == "call_function" else None
        source = _source(node.args[1]) if place is not None else None
        if place is None or source is None or source.name not in users or _is_floating(source):
            continue
        shape = node.args[0].meta["val"].shape
        classes = shape[1 if len(shape) > 1 else 0]
        if isinstance(classes, int):
            ignored = node.args[place] if len(node.args) > place else node.kwargs.get("ignore_index", _DEFAULT_IGNORED)
            found[names[users.index(source.name)]] = [classes, int(ignored)]
    for model in models if found else ():
        model.metadata_props.add(key=LABELS, value=json.dumps(found))


def _source(node: Any) -> fx.Node | None:
    """The placeholder whose every value becomes a label."""
    while isinstance(node, fx.Node) and node.op == "call_function" and str(node.target).split(".")[1:2] and _keeps(node):
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.op == "placeholder" else None


def _keeps(node: fx.Node) -> bool:
    return str(node.target).split(".")[1] in _KEEP_EVERY_LABEL


def _is_floating(node: fx.Node) -> bool:
    """Class probabilities instead of indices."""
    return bool(node.meta["val"].is_floating_point())
