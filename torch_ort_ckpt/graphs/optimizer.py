"""Optimizer graphs: reading and creating `optimizer_model.onnx`."""

from __future__ import annotations

import dataclasses

import onnx
import torch
from onnx import TensorProto, helper

from ..errors import CheckpointError, UnsupportedError
from .artifacts import OptimizerSpec


def optimizer_spec(source: str | OptimizerSpec | torch.optim.Optimizer | None) -> OptimizerSpec | None:
    """The requested hyper-parameters: a name (PyTorch's defaults), a spec, or a PyTorch optimizer to copy them from."""
    if source is None or isinstance(source, OptimizerSpec):
        return source
    if isinstance(source, str):
        known = {
            "adamw": OptimizerSpec("AdamW", eps=1e-8, weight_decay=0.01),
            "sgd": OptimizerSpec("SGD", betas=(0.0, 0.0), eps=0.0),
        }
        if source.lower() not in known:
            raise CheckpointError(f"no optimizer {source!r}", remedy='Use "adamw", "sgd", an OptimizerSpec or a torch.optim optimizer.')
        return known[source.lower()]
    return _from_torch(source)


def optimizer_model(spec: OptimizerSpec, opset: int = 15) -> onnx.ModelProto:
    """The graph ORT's own optimizer runs: one node over sequences of parameters, gradients and moments."""
    sequences = ["params", "gradients", "first_order_moments"] + (["second_order_moments"] if spec.kind == "AdamW" else [])
    inputs = [
        helper.make_tensor_value_info("learning_rate", TensorProto.FLOAT, [1]),
        helper.make_tensor_value_info("step", TensorProto.INT64, [1]),
        *(helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None) for name in sequences),
    ]
    gradients = "gradients" if spec.max_norm is None else "clipped_gradients"
    nodes = []
    if spec.max_norm is not None:
        nodes.append(helper.make_node("InplaceClipGradNorm", ["gradients"], [gradients], domain="com.microsoft", max_norm=spec.max_norm))
    if spec.kind == "AdamW":
        nodes.append(
            helper.make_node(
                "AdamWOptimizer",
                ["learning_rate", "step", "params", gradients, "first_order_moments", "second_order_moments"],
                ["updated"],
                domain="com.microsoft",
                alpha=spec.betas[0],
                beta=spec.betas[1],
                epsilon=spec.eps,
                weight_decay=spec.weight_decay,
                adam_mode=spec.adam_mode,
                correct_bias=int(spec.correct_bias),
            )
        )
    elif spec.kind == "SGD":
        nodes.append(helper.make_node("SGDOptimizerV2", ["learning_rate", "params", gradients], ["updated"], domain="com.microsoft"))
    else:
        raise UnsupportedError(f"ORT has no optimizer {spec.kind!r}", remedy='Use kind="AdamW" or "SGD".')
    graph = helper.make_graph(nodes, "optimizer", inputs, [helper.make_tensor_value_info("updated", TensorProto.BOOL, [1])])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="torch_ort_ckpt")


def _from_torch(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    group = optimizer.param_groups[0]
    if isinstance(optimizer, torch.optim.AdamW) and not group.get("amsgrad") and not group.get("maximize"):
        spec = OptimizerSpec("AdamW", tuple(group["betas"]), float(group["eps"]), float(group["weight_decay"]))
    elif isinstance(optimizer, torch.optim.SGD) and not any(group.get(key) for key in ("momentum", "weight_decay", "maximize")):
        spec = OptimizerSpec("SGD", betas=(0.0, 0.0), eps=0.0)
    else:
        raise UnsupportedError(
            f"ORT has no graph for this {type(optimizer).__name__}", remedy="It has AdamW (without amsgrad) and plain SGD; use one of them."
        )
    return dataclasses.replace(spec, adam_mode=0)
