"""Dropout with a seed that is an input: ONNX's own operators take a seed only as a constant attribute."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from ...errors import UnsupportedError
from ..description import RANDOM_OPS, all_nodes
from .fragment import Fragment

SEED = "seed"
_ROUNDS = 4
_HALF = 1 << 16


def feed_seeds(model: onnx.ModelProto, fragment: Fragment) -> bool:
    """Replace every Dropout by nodes whose mask is a function of the input `seed`, the node and the element's place.

    Returns whether there was one. The same seed gives the same mask in every runtime.
    """
    graph = model.graph
    drawn = [node for node in all_nodes(graph) if node.op_type in RANDOM_OPS]
    if odd := next((node for node in drawn if node.op_type != "Dropout" or node not in list(graph.node)), None):
        raise UnsupportedError(f"a step model can't draw the random numbers of {odd.op_type}", field=odd.name, remedy="Use Dropout.")
    if not drawn:
        return False
    made = Fragment()
    made._taken = fragment._taken
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type != "Dropout":
            nodes.append(node)
            continue
        made.nodes = []
        _dropout(made, node, len(nodes))
        nodes += made.nodes
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    graph.initializer.extend(made.constants)
    return True


def add_seed(model: onnx.ModelProto) -> bool:
    """Replace every Dropout of a whole graph, and add the input `seed` (int64, no dimensions); returns whether there was one."""
    graph = model.graph
    taken = {name for node in all_nodes(graph) for name in (*node.input, *node.output)} | {tensor.name for tensor in graph.initializer}
    taken |= {value.name for value in graph.input}
    if SEED in taken and any(node.op_type in RANDOM_OPS for node in all_nodes(graph)):
        raise UnsupportedError("a tensor of the graph is called like the input for dropout's seed", field=SEED, remedy="Rename it.")
    if not feed_seeds(model, Fragment(taken)):
        return False
    graph.input.append(helper.make_tensor_value_info(SEED, TensorProto.INT64, []))
    return True


def _dropout(graph: Fragment, node: onnx.NodeProto, number: int) -> None:
    """As ONNX's Dropout in training mode: the kept elements times 1 / (1 - ratio), and the mask."""
    ratio = node.input[1] if len(node.input) > 1 and node.input[1] else graph.constant(0.5)
    shape = graph("Shape", node.input[0])
    uniform = graph("Reshape", _uniform(graph, graph("Size", node.input[0]), number), shape)
    mask = node.output[1] if len(node.output) > 1 and node.output[1] else graph.fresh("mask")
    graph("GreaterOrEqual", uniform, graph("Cast", ratio, to=TensorProto.FLOAT), name=mask)
    scale = graph("Div", graph.constant(1.0), graph("Sub", graph.constant(1.0), graph("Cast", ratio, to=TensorProto.FLOAT)))
    factor = graph("CastLike", graph("Mul", graph("Cast", mask, to=TensorProto.FLOAT), scale), node.input[0])
    graph("Mul", node.input[0], factor, name=node.output[0])


def _uniform(graph: Fragment, size: str, number: int) -> str:
    """`size` numbers in [0, 1): a Feistel cipher of the element's place, keyed by the seed and the node's number.

    Halves of 16 bits keep every product below 2^63, so that it needs no unsigned or wrapping arithmetic, which runtimes lack.
    """

    def whole(value: int) -> str:
        return graph.constant(value, np.int64)

    half, words = whole(_HALF), whole(1 << 32)
    place = graph("Range", whole(0), size, whole(1))
    left, right = graph("Mod", graph("Div", place, half), half), graph("Mod", place, half)
    # Fold the seed to 31 bits first: a client may pass any int64.
    key = graph("Mod", graph("Mul", graph("Mod", SEED, whole(0x7FFFFFFF)), whole(48271)), whole(0x7FFFFFFF))
    key = graph("Mod", graph("Add", key, whole(number * 0x9E3779B1 % 0x7FFFFFFF)), whole(0x7FFFFFFF))
    for turn in range(_ROUNDS):
        mixed = graph("Add", graph("Mul", right, whole(0x5BD1E995 >> turn)), key)
        mixed = graph("Mod", mixed, words)
        mixed = graph(
            "Mod", graph("Mul", graph("Div", mixed, half), graph("Add", graph("Mod", mixed, half), whole(0x9E37 + 2 * turn))), words
        )
        mixed = graph("Div", mixed, whole(1 << 9))
        left, right = right, graph("Mod", graph("Add", left, mixed), half)
        key = graph("Mod", graph("Mul", key, whole(16807)), whole(0x7FFFFFFF))
    number_of = graph("Add", graph("Mul", left, half), right)
    return graph("Mul", graph("Cast", number_of, to=TensorProto.FLOAT), graph.constant(2.0**-32))
