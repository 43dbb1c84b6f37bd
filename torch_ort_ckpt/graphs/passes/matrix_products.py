"""Products of two matrices as Gemm, with what is added to them and the transposes before them.

ONNX Runtime does that itself where all sizes are fixed; a joint graph has a dynamic batch. Gemm also has less to find out at every run
than MatMul, which takes any number of axes.
"""

from __future__ import annotations

import onnx
from onnx import helper

from ..description import attributes, reads
from .declared_shapes import declared_shapes
from .rewriting import set_items


def use_gemm(model: onnx.ModelProto) -> int:
    """Needs declared shapes. Transposes that nobody reads any more go with the other unused nodes (`unused_nodes`)."""
    graph = model.graph
    shapes = declared_shapes(model)
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
    sources = {node.output[0]: node for node in graph.node if node.op_type == "Transpose"}
    readers: dict[str, int] = {value.name: 1 for value in graph.output}
    for node in graph.node:
        for name in reads(node):
            readers[name] = readers.get(name, 0) + 1
    products: dict[str, onnx.NodeProto] = {}
    count, removed = 0, set()
    for node in graph.node:
        if node.op_type == "MatMul" and all(len(shapes.get(name, ())) == 2 for name in node.input):
            if types.get(node.output[0]) != onnx.TensorProto.FLOAT:
                continue
            node.op_type = "Gemm"
            for place, option in ((0, "transA"), (1, "transB")):
                source = sources.get(node.input[place])
                swapped = source is not None and list(attributes(source).get("perm", (1, 0))) == [1, 0]
                if source is not None and swapped:
                    node.input[place] = source.input[0]
                node.attribute.append(helper.make_attribute(option, int(swapped)))
            products[node.output[0]] = node
            count += 1
        elif node.op_type == "Add":
            for place in (0, 1):
                product, other = products.get(node.input[place]), node.input[1 - place]
                shape = shapes.get(node.input[place])
                if (
                    product is None
                    or shape is None
                    or len(product.input) > 2
                    or readers[node.input[place]] > 1
                    or shapes.get(other) != shape
                ):
                    continue
                removed.add(id(product))  # its result may be needed only here, where the other operand is known
                merged = helper.make_node("Gemm", [*product.input, other], node.output, name=node.name)
                merged.attribute.extend(product.attribute)
                node.CopyFrom(merged)
                products[node.output[0]] = node
                break
    if removed:
        set_items(graph.node, [node for node in graph.node if id(node) not in removed])
    return count
