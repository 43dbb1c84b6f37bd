"""BatchNorm's running variance, which ORT's CPU kernel computes from the biased variance of the batch. PyTorch uses the unbiased one.

With the momentum m and n values per channel the graph computes `m*old + (new - m*old) * n/(n-1)`, as an output of its own.
"""

from __future__ import annotations

import onnx

from ..batch_norms import batch_norms
from .rewriting import NewNodes, replace_nodes


def unbiased_variances(model: onnx.ModelProto) -> dict[str, str]:
    """Running variance -> the output that `unbias_variances` will add to this model for its new value."""
    nodes = {node.output[0]: node for node in model.graph.node if node.output}
    norms = [norm for norm in batch_norms(model) if len(nodes[norm.output].output) > 2 and nodes[norm.output].output[2]]
    return {norm.variance: f"{norm.output}.unbiased" for norm in norms}


def unbias_variances(model: onnx.ModelProto) -> int:
    graph = model.graph
    variances = {value.name: value.type.tensor_type for value in graph.input}
    norms = {norm.output: norm for norm in batch_norms(model)}
    results = unbiased_variances(model)
    latest: dict[str, str] = {}

    def rewrite(node: onnx.NodeProto) -> NewNodes | None:
        norm = norms.get(node.output[0]) if node.output else None
        if norm is None or len(node.output) < 3 or not node.output[2]:
            return None
        result = f"{norm.output}.unbiased"
        new = NewNodes(f"{result}.part")
        old, kind, double = latest.get(norm.variance, norm.variance), variances[norm.variance].elem_type, onnx.TensorProto.DOUBLE
        (channels,) = (dim.dim_value for dim in variances[norm.variance].shape.dim)
        # The kernel overwrites its input, so it gets a copy: one that no optimization removes. A variance is never negative.
        node.input[4] = new.add("Abs", old)
        new.nodes.append(node)
        one = new.scalar(1.0, double)
        count = new.add("Div", new.add("Cast", new.add("Size", node.input[0]), to=double), new.scalar(float(channels), double))
        factor = new.add("Cast", new.add("Div", count, new.add("Max", new.add("Sub", count, one), one)), to=kind)
        kept = new.add("Mul", old, new.scalar(norm.momentum, kind))
        latest[norm.variance] = new.add("Add", kept, new.add("Mul", new.add("Sub", node.output[2], kept), factor), output=result)
        return new

    count = replace_nodes(model, rewrite)
    graph.output.extend(onnx.helper.make_tensor_value_info(output, variances[name].elem_type, None) for name, output in results.items())
    return count
