"""From a module that returns its loss to a joint graph, to ONNX, to onnxruntime, with nothing of the package but the decompositions."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.export import Dim
from torch.export.exported_program import ExportedProgram, _decompose_exported_program
from torch.export.graph_signature import OutputKind, OutputSpec
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_ort_ckpt.graphs.gradients.decompositions import after_autograd, before_autograd, dropped, while_exporting
from torch_ort_ckpt.graphs.gradients.decompositions.onnx_operators import translations

from .case import Case

aten = torch.ops.aten
BATCH_NORM = [aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.default,
              aten._native_batch_norm_legit.no_stats, aten.native_batch_norm.default]  # fmt: skip


class Called(nn.Module):
    """A module whose inputs are all positional, so that one form of dynamic shapes fits all."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return self.module(*values)


@dataclass(frozen=True)
class Difference:
    """The largest difference of loss, gradients and updated buffers, relative to the largest element of each."""

    worst: float
    nodes: int


def compare(case: Case, *, optimize: bool = False, batches: tuple[int, ...] = (4, 7)) -> Difference:
    import onnxruntime

    torch.manual_seed(0)
    module = Called(case.module())
    examples = [case.inputs(batch) for batch in batches]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = joint(module, examples[0], optimize)
        model, outputs = to_onnx(program)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    worst = 0.0
    for example in examples:
        twin = copy.deepcopy(module)
        loss = twin(*example)
        loss.backward()
        expected: dict[OutputKind, Any] = {
            OutputKind.LOSS_OUTPUT: {None: loss},
            OutputKind.GRADIENT_TO_PARAMETER: {name: value.grad for name, value in twin.named_parameters()},
            OutputKind.BUFFER_MUTATION: dict(twin.named_buffers()),
        }
        feed = dict(zip([value.name for value in session.get_inputs()], [value.numpy() for value in example], strict=False))
        for (kind, name), ours in zip(outputs, session.run(None, feed), strict=True):
            theirs = expected[kind][None if kind is OutputKind.LOSS_OUTPUT else name].detach().numpy()
            assert ours.shape == theirs.shape, f"{name}: {ours.shape} instead of {theirs.shape}"
            difference = float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-6))
            worst = difference if not difference <= worst else worst  # NaN stays
    return Difference(worst, len(model.graph.node))


def joint(module: nn.Module, example: tuple[torch.Tensor, ...], optimize: bool) -> ExportedProgram:
    module = copy.deepcopy(module)
    shapes = (tuple({0: Dim.AUTO} for _ in example),)
    with sdpa_kernel(SDPBackend.MATH), while_exporting():
        program = torch.export.export(module, example, dynamic_shapes=shapes)
    before = _sizes(program)
    assert any(not size.isdigit() for sizes in before for size in sizes), "torch.export fixed the batch"
    core = dict(torch._decomp.core_aten_decompositions())
    core.update({operator: torch._decomp.decomposition_table[operator] for operator in BATCH_NORM})
    table = {**core, **after_autograd(optimize=optimize, otherwise=core)}
    for operator in dropped():
        table.pop(operator, None)
    with sdpa_kernel(SDPBackend.MATH), before_autograd():
        result = _decompose_exported_program(
            program, cia_to_decomp={}, python_decomp_table=table, joint_loss_index=0, decompose_custom_triton_ops=False
        )
    assert _sizes(result) == before, "a dynamic size became a number"
    result.graph.eliminate_dead_code()
    result.graph_module.recompile()
    return result


def _sizes(program: ExportedProgram) -> list[list[str]]:
    inputs = program.graph_signature.user_inputs
    return [
        [str(size) for size in node.meta["val"].shape] for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs
    ]


def to_onnx(program: ExportedProgram) -> tuple[onnx.ModelProto, list[tuple[OutputKind, Any]]]:
    """The model, and what each output is."""
    signature = program.graph_signature
    kinds = [(spec.kind, spec.target) for spec in signature.output_specs]
    signature.output_specs[:] = [OutputSpec(OutputKind.USER_OUTPUT, spec.arg, None) for spec in signature.output_specs]
    root = program.module_call_graph[0].signature
    root.out_spec = pytree.tree_flatten(tuple(range(len(kinds))))[1]
    root.outputs = [spec.arg for spec in signature.output_specs]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        made = torch.onnx.export(
            program, dynamo=True, optimize=False, opset_version=18, verbose=False, custom_translation_table=translations()
        )
    assert made is not None
    model = made.model_proto
    nodes = []
    for node in model.graph.node:  # ScatterND takes int64 indices only
        if node.op_type == "ScatterND":
            wide = f"{node.output[0]}.indices"
            nodes.append(onnx.helper.make_node("Cast", [node.input[1]], [wide], to=onnx.TensorProto.INT64))
            node.input[1] = wide
        nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model, kinds
