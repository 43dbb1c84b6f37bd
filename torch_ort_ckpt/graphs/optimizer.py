"""Optimizer graphs: `optimizer_model.onnx` created, read and changed.

Inputs are a learning rate, a step, and sequences of tensors, one for each role; the output says whether an update took place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import onnx
import torch
from onnx import TensorProto, helper

from ..checkpoint.state import OptimizerSpec
from ..errors import CheckpointError, UnsupportedError
from .description import attributes
from .passes.rewriting import set_items

LEARNING_RATE, STEP = "learning_rate", "step"
PARAMETERS, GRADIENTS, FIRST_MOMENTS, SECOND_MOMENTS = "params", "gradients", "first_order_moments", "second_order_moments"
"""Names of the inputs. SGD declares the first moments too, but does not use them."""


_NAMED = {
    "adamw": OptimizerSpec("AdamW", eps=1e-8, weight_decay=0.01),
    "adam": OptimizerSpec("Adam", eps=1e-8),
    "sgd": OptimizerSpec("SGD", betas=(0.0, 0.0), eps=0.0),
}


def optimizer_spec(source: str | OptimizerSpec | torch.optim.Optimizer | None, *, for_training_api: bool = True) -> OptimizerSpec | None:
    """The requested hyper-parameters: a name (PyTorch's defaults), a spec, or a PyTorch optimizer to copy them from.

    ONNX Runtime's training API has two kernels: AdamW, and SGD without momentum and weight decay. What they can't compute is refused,
    unless the update is written in standard operators (`for_training_api=False`).
    """
    if source is None:
        return None
    if isinstance(source, str):
        if source.lower() not in _NAMED:
            names = ", ".join(f'"{name}"' for name in _NAMED)
            raise CheckpointError(f"no optimizer {source!r}", remedy=f"Use {names}, an OptimizerSpec or a torch.optim optimizer.")
        source = _NAMED[source.lower()]
    spec = source if isinstance(source, OptimizerSpec) else _from_torch(source)
    return _for_training_api(spec) if for_training_api else spec


def _for_training_api(spec: OptimizerSpec) -> OptimizerSpec:
    remedy = "Use AdamW or plain SGD, or train with a step model (export_step_model) or torch.optim, which have it."
    if spec.kind == "Adam":
        if spec.weight_decay:
            raise UnsupportedError("ONNX Runtime has no Adam with weight decay that is part of the gradient", remedy=remedy)
        return dataclasses.replace(spec, kind="AdamW")  # without weight decay they are the same
    if spec.kind == "SGD" and (spec.momentum or spec.weight_decay or spec.nesterov):
        raise UnsupportedError("ONNX Runtime's SGD has no momentum and no weight decay", remedy=remedy)
    return spec


def optimizer_model(spec: OptimizerSpec, opset: int = 15) -> onnx.ModelProto:
    """The graph ORT's own optimizer runs: one node over sequences of parameters, gradients and moments."""
    sequences = [PARAMETERS, GRADIENTS, FIRST_MOMENTS] + ([SECOND_MOMENTS] if spec.kind == "AdamW" else [])
    inputs = [
        helper.make_tensor_value_info(LEARNING_RATE, TensorProto.FLOAT, [1]),
        helper.make_tensor_value_info(STEP, TensorProto.INT64, [1]),
        *(helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None) for name in sequences),
    ]
    gradients = GRADIENTS if spec.max_norm is None else "clipped_gradients"
    nodes = []
    if spec.max_norm is not None:
        nodes.append(helper.make_node("InplaceClipGradNorm", [GRADIENTS], [gradients], domain="com.microsoft", max_norm=spec.max_norm))
    if spec.kind == "AdamW":
        nodes.append(
            helper.make_node(
                "AdamWOptimizer",
                [LEARNING_RATE, STEP, PARAMETERS, gradients, FIRST_MOMENTS, SECOND_MOMENTS],
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
        nodes.append(helper.make_node("SGDOptimizerV2", [LEARNING_RATE, PARAMETERS, gradients], ["updated"], domain="com.microsoft"))
    else:
        raise UnsupportedError(f"ORT has no optimizer {spec.kind!r}", remedy='Use kind="AdamW" or "SGD".')
    graph = helper.make_graph(nodes, "optimizer", inputs, [helper.make_tensor_value_info("updated", TensorProto.BOOL, [1])])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="torch_ort_ckpt")


def read_optimizer(model: onnx.ModelProto, path: Path) -> OptimizerSpec:
    """What an optimizer graph does."""
    nodes = {node.op_type: attributes(node) for node in model.graph.node}
    clip = nodes.get("InplaceClipGradNorm")
    max_norm = float(clip.get("max_norm", 1.0)) if clip is not None else None
    if "AdamWOptimizer" in nodes:
        values = nodes["AdamWOptimizer"]
        return OptimizerSpec(
            kind="AdamW",
            betas=(_decimal(values.get("alpha", 0.9)), _decimal(values.get("beta", 0.999))),
            eps=_decimal(values.get("epsilon", 1e-8)),
            weight_decay=_decimal(values.get("weight_decay", 0.0)),
            adam_mode=int(values.get("adam_mode", 0)),
            correct_bias=bool(values.get("correct_bias", 1)),
            max_norm=max_norm,
        )
    if "SGDOptimizerV2" in nodes:
        return OptimizerSpec(kind="SGD", betas=(0.0, 0.0), eps=0.0, max_norm=max_norm)
    raise UnsupportedError(f"an optimizer graph of {', '.join(sorted(nodes))}", path=path, remedy="Use a torch.optim optimizer.")


def guess_optimizer(inputs: Iterable[str]) -> OptimizerSpec:
    """The kind of optimizer of a graph of which only the inputs are known (`.ort`)."""
    return OptimizerSpec("AdamW" if SECOND_MOMENTS in set(inputs) else "SGD", known=False)


def set_hyperparameters(model: onnx.ModelProto, spec: OptimizerSpec) -> int:
    """Give an AdamW graph other hyper-parameters, in place: they are attributes of its node."""
    values = {"alpha": spec.betas[0], "beta": spec.betas[1], "epsilon": spec.eps, "weight_decay": spec.weight_decay}
    nodes = [node for node in model.graph.node if node.op_type == "AdamWOptimizer"]
    for node in nodes:
        kept = [item for item in node.attribute if item.name not in values]
        set_items(node.attribute, [*kept, *(helper.make_attribute(name, float(value)) for name, value in values.items())])
    return len(nodes)


def _decimal(value: float) -> float:
    """The attribute as it was entered: graphs hold float32, so 0.999 is read as 0.9990000128746033."""
    return float(f"{value:.7g}")


def _from_torch(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    group = optimizer.param_groups[0]
    decay = float(group.get("weight_decay", 0.0))
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and not group.get("amsgrad") and not group.get("maximize"):
        decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
        return OptimizerSpec("AdamW" if decoupled else "Adam", tuple(group["betas"]), float(group["eps"]), decay)
    if isinstance(optimizer, torch.optim.SGD) and not group.get("dampening") and not group.get("maximize"):
        momentum, nesterov = float(group["momentum"]), bool(group["nesterov"])
        return OptimizerSpec("SGD", (0.0, 0.0), 0.0, decay, momentum=momentum, nesterov=nesterov)
    raise UnsupportedError(
        f"no graph can be written for this {type(optimizer).__name__}",
        remedy="Use AdamW or Adam without amsgrad, or SGD without dampening, and without maximize.",
    )
