"""Stage 3: PyTorch makes one graph of forward and backward, decomposed to operators that can be translated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...errors import UnsupportedError
from . import decompositions, private_export
from .capture import TRACING_ERRORS, Captured, quiet
from .label_range import refusing_table
from .randomness import random_table
from .shape_check import Symbols, compare_shapes, symbols
from .where import first_line, line_of_error, line_of_node

aten = torch.ops.aten

_KEPT = (aten.native_dropout.default, aten.detach.default)
"""Entries of PyTorch's table that are left out: dropout becomes ONNX Dropout, whose mask the backward reads, and a `detach` must still be
one in the graph, for those who differentiate its forward part again."""


@dataclass(frozen=True)
class Role:
    """What an input of the joint graph is ("input", "parameter", "buffer", "constant"), or an output ("loss", "output", "gradient",
    "update": the new value of a buffer), and of which name."""

    kind: str
    name: str
    positional: bool = False
    """Whether the program takes it as an argument; otherwise it is one of the program's own tensors."""


@dataclass(frozen=True)
class JointProgram:
    """The joint graph before translation. `program` has PyTorch's own signature, as ExecuTorch takes it."""

    program: ExportedProgram
    captured: Captured
    inputs: list[Role]
    outputs: list[Role]


def table(*, optimize: bool = False) -> private_export.Table:
    """The decompositions of the joint graph: PyTorch's, then ours, then the user's. With `optimize`, our faster forms too."""
    below = {**private_export.pytorch_table(), **refusing_table(), **random_table()}
    found = {**below, **decompositions.after_autograd(optimize=optimize, otherwise=below)}
    for operator in (*_KEPT, *decompositions.dropped()):
        found.pop(operator, None)
    return found


def joint(captured: Captured, *, optimize: bool = False) -> JointProgram:
    """Forward and backward of a captured module whose first output is its loss. `optimize`: see `table`."""
    chosen, before = table(optimize=optimize), symbols(captured.program)
    _mark_no_grad(captured.program)
    with quiet(), sdpa_kernel(SDPBackend.MATH), decompositions.before_autograd():
        try:
            if not private_export.has_first_way():
                return _by_tracing(captured, chosen, before)
            program = private_export.joint_by_export(captured.program, chosen)
        except TRACING_ERRORS as error:
            raise UnsupportedError(
                f"PyTorch can't make the gradient graph ({first_line(error)})",
                field=line_of_error(error) or _line_in(captured, error),
                remedy="Replace the operator in the module, or give it a decomposition: torch_ort_ckpt.register_decomposition.",
            ) from error
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    compare_shapes(captured, before, program)
    inputs = input_roles(program, captured.inputs)
    outputs = []
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.LOSS_OUTPUT:
            outputs.append(Role("loss", "loss"))
        elif spec.kind is OutputKind.GRADIENT_TO_PARAMETER:
            outputs.append(Role("gradient", str(spec.target)))
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            outputs.append(Role("update", str(spec.target)))
        elif spec.kind is OutputKind.USER_OUTPUT:
            outputs.append(Role("output", ""))
        else:
            raise UnsupportedError(f"the module changes its input {spec.target!r}", remedy="Work on a copy: x = x.clone().")
    return JointProgram(program, captured, inputs, outputs)


def _by_tracing(captured: Captured, chosen: private_export.Table, symbols_before: Symbols) -> JointProgram:
    """The joint graph by the second way, in the same form."""
    before = input_roles(captured.program, captured.inputs)
    program, trained, updated = private_export.joint_by_tracing(captured.program, chosen)
    constants = [Role("constant", role.name) for role in before if role.kind == "constant"]
    inputs = [Role(role.kind, role.name, positional=True) for role in before if role.kind != "constant"]
    compare_shapes(captured, symbols_before, program, [place for place, role in enumerate(inputs) if role.kind == "input"])
    count = len(program.graph_signature.output_specs) - len(trained) - len(updated)
    outputs = [Role("loss", "loss"), *(Role("output", "") for _ in range(count - 1))]
    outputs += [Role("gradient", name) for name in trained] + [Role("update", name) for name in updated]
    return JointProgram(program, captured, [*constants, *inputs], outputs)


def input_roles(program: ExportedProgram, names: list[str]) -> list[Role]:
    """What the placeholders of a program are, in order."""
    roles = []
    users = iter(names)
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            roles.append(Role("input", next(users), positional=True))
        elif spec.kind is InputKind.PARAMETER:
            roles.append(Role("parameter", str(spec.target)))
        elif spec.kind is InputKind.BUFFER and spec.persistent:
            roles.append(Role("buffer", str(spec.target)))
        else:
            roles.append(Role("constant", str(spec.target)))
    return roles


def _mark_no_grad(program: ExportedProgram) -> None:
    """Detach the results of `with torch.no_grad()`: in the joint graph nothing else would show that no gradient flows there."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target) == "wrap_with_set_grad_enabled" and node.args and node.args[0] is False:
            for result in [user for user in node.users if isinstance(user.meta.get("val"), torch.Tensor)]:
                with graph.inserting_after(result):
                    detached = graph.call_function(aten.detach.default, (result,))
                detached.meta = dict(result.meta)
                result.replace_all_uses_with(detached, lambda user, detached=detached: user is not detached)
    program.graph_module.recompile()


def _line_in(captured: Captured, error: BaseException) -> str | None:
    """The user's line of the node that an error names."""
    text = str(error)
    return next((line_of_node(node) for node in captured.program.graph.nodes if str(node.target) in text), None)
