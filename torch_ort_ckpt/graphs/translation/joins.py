"""Groups of nodes of a translated graph that one PyTorch function replaces.

Exporters write `nn.Linear` on more than two dimensions as Transpose, MatMul and Add. As one function it is a single kernel, forward and
backward, eager and compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .ops_shape import transpose


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def join_linear(module: fx.GraphModule, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Use `linear` where a bias is added to a product with a transposed weight. `shapes` are those of the arguments, where known."""
    for add in module.graph.find_nodes(op="call_function", target=operator.add):
        if (found := _linear_of(add, shapes)) is None:
            continue
        product, weight, bias = found
        with module.graph.inserting_before(add):
            joined = module.graph.create_node("call_function", linear, (product.args[0], weight, bias), name=add.name)
        joined.meta.update(add.meta)
        add.replace_all_uses_with(joined)
        for node in (add, product, product.args[1]):
            if not node.users:
                module.graph.erase_node(node)
    module.recompile()


def _linear_of(add: fx.Node, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, fx.Node, fx.Node] | None:
    """The product, the weight and the bias, if that is what is added."""
    for bias, product in (add.args, add.args[::-1]):
        if not (isinstance(bias, fx.Node) and isinstance(product, fx.Node) and product.target is torch.matmul and len(product.users) == 1):
            continue
        turned = product.args[1]
        if not (isinstance(turned, fx.Node) and turned.target is transpose and turned.kwargs.get("perm") == [1, 0]):
            continue
        weight = turned.args[0]
        if isinstance(weight, fx.Node) and shapes.get(bias.name) == shapes.get(weight.name, ())[:1] != ():
            return product, weight, bias
    return None
