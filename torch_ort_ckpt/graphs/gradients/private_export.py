"""PyTorch's private names that make the joint graph of forward and backward; no other module of the pipeline has any.

PyTorch calls its own way (`torch.export.experimental`) unstable, so there is a second one that does without it: `make_fx` over a function
that calls `torch.autograd.grad`. Both give the same graph in the same form; `tests/graphs/gradients/test_joint.py` removes the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from traceback import StackSummary, extract_stack
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

try:
    from torch.export.exported_program import _decompose_exported_program
except ImportError:  # a release that has moved it
    _decompose_exported_program = None  # type: ignore[assignment]

Table = dict[Any, Callable[..., Any]]

_BATCH_NORM = (
    "_native_batch_norm_legit_functional.default",
    "_native_batch_norm_legit.default",
    "_native_batch_norm_legit.no_stats",
    "native_batch_norm.default",
)


def pytorch_table() -> Table:
    """PyTorch's decompositions to its core operators, and those of BatchNorm, which it leaves out."""
    known = torch._decomp.decomposition_table
    table: Table = dict(torch._decomp.core_aten_decompositions())
    for name in _BATCH_NORM:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload)
        if operator in known:
            table[operator] = known[operator]
    return table


def has_first_way() -> bool:
    return _decompose_exported_program is not None


def joint_by_export(program: ExportedProgram, table: Table) -> ExportedProgram:
    """The joint graph as `torch.export.experimental._export_forward_backward` makes it, with our table instead of its own."""
    found: ExportedProgram = _decompose_exported_program(
        program, cia_to_decomp={}, python_decomp_table=table, joint_loss_index=0, decompose_custom_triton_ops=False
    )
    return found


def joint_by_tracing(program: ExportedProgram, table: Table) -> tuple[ExportedProgram, list[str], list[str]]:
    """The same by a function that calls `torch.autograd.grad`, traced by `make_fx` and captured again by `torch.export`.

    All parameters and buffers are then inputs, in the order of the program's own placeholders, without its constants. The outputs are
    those of the program, then the gradients, then the new values of buffers. Also returns the names of these parameters and buffers.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    specs = program.graph_signature.input_specs
    nodes = placeholders(program.graph)
    fakes = [node.meta["val"] for node in nodes]
    trained = [place for place, spec in enumerate(specs) if _requires_grad(program, spec)]
    changed = _changed_buffers(program)
    updated = [place for place, spec in enumerate(specs) if spec.target in changed]

    def both(*values: Any) -> tuple[Any, ...]:
        arguments = list(values)
        for place in updated:
            arguments[place] = arguments[place].clone()
        for place in trained:
            arguments[place] = arguments[place].detach().requires_grad_()
        with torch.enable_grad():
            loss, *others = fx.Interpreter(program.graph_module).run(*arguments)
            gradients = torch.autograd.grad(loss, [arguments[place] for place in trained])
        return (loss, *others, *gradients, *(arguments[place] for place in updated))

    mode = next(value.fake_mode for value in fakes if hasattr(value, "fake_mode"))
    with mode, enable_python_dispatcher():
        traced = make_fx(both, decomposition_table=table)(*fakes)
    _remove_first_detach(traced, trained)
    constants = {place: program.constants[spec.target] for place, spec in enumerate(specs) if spec.target in program.constants}
    captured = torch.export.export(
        _WithConstants(traced, constants),
        tuple(_example(program, place, fakes) for place in range(len(specs)) if place not in constants),
        dynamic_shapes=(
            tuple(
                {axis: torch.export.Dim.AUTO for axis, size in enumerate(fakes[place].shape) if symbol_of(size) is not None}
                for place in range(len(specs))
                if place not in constants
            ),
        ),
        strict=False,
    )
    return captured, [str(specs[place].target) for place in trained], [str(specs[place].target) for place in updated]


def _remove_first_detach(traced: fx.GraphModule, places: list[int]) -> None:
    """Remove the `detach` that makes each argument at `places` a leaf: differentiating the forward part again would stop there."""
    nodes = placeholders(traced.graph)
    for place in places:
        first = next(node for node in traced.graph.nodes if node.target is torch.ops.aten.detach.default and node.args[0] is nodes[place])
        first.replace_all_uses_with(nodes[place])
        traced.graph.erase_node(first)
    traced.recompile()


class _WithConstants(torch.nn.Module):
    """A traced function whose arguments at some places are constants."""

    def __init__(self, function: torch.nn.Module, constants: dict[int, Any]) -> None:
        super().__init__()
        self.function = function
        self.places = list(constants)
        for place, value in constants.items():
            self.register_buffer(f"constant{place}", value, persistent=False)

    def forward(self, *values: Any) -> Any:
        rest, count = iter(values), len(values) + len(self.places)
        return self.function(*(getattr(self, f"constant{place}") if place in self.places else next(rest) for place in range(count)))


def _requires_grad(program: ExportedProgram, spec: Any) -> bool:
    return spec.kind is InputKind.PARAMETER and program.state_dict[spec.target].requires_grad


def _changed_buffers(program: ExportedProgram) -> set[str]:
    """The buffers that an operator of the program writes to."""
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.kind is InputKind.BUFFER}
    found = set()
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for argument, value in zip(schema.arguments, node.args, strict=False) if schema is not None else ():
            while isinstance(value, fx.Node) and value.op == "call_function" and _is_in_place(value) and value.args:
                value = value.args[0]
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node) and value.name in targets:
                found.add(targets[value.name])
            if node.target is torch.ops.aten.batch_norm.default and isinstance(value, fx.Node) and node.args[5] and value.name in targets:
                found.add(targets[value.name])  # its schema does not say that it writes to the running statistics
    return found


def _is_in_place(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    info = schema.arguments[0].alias_info if schema is not None and schema.arguments else None
    return info is not None and bool(info.is_write)


def _example(program: ExportedProgram, place: int, fakes: list[Any]) -> torch.Tensor:
    """The value that was traced with."""
    spec = program.graph_signature.input_specs[place]
    if spec.kind is InputKind.USER_INPUT:
        before = sum(other.kind is InputKind.USER_INPUT for other in program.graph_signature.input_specs[:place])
        value: torch.Tensor = pytree.tree_leaves(program.example_inputs)[before]
    else:
        value = program.state_dict[spec.target]
    return value.detach()


def symbol_of(size: Any) -> str | None:
    """The expression of a symbolic size (`s0`, `2*s0`); None for a number."""
    return (
        str(size.node.expr)
        if isinstance(size, torch.SymInt) and not size.node.is_constant() and not str(size.node.expr).isdigit()
        else None
    )


_FIXING = "_set_replacement"
"""The method that PyTorch calls when a symbolic size turns out to be a number."""


@contextlib.contextmanager
def noting_fixed_sizes() -> Iterator[dict[str, StackSummary]]:
    """While this is open: symbol -> the stack when PyTorch took it for a number. PyTorch itself keeps one frame, often of its own code."""
    found: dict[str, StackSummary] = {}
    original: Any = getattr(ShapeEnv, _FIXING, None)
    if original is None:  # only the line of an error would be missing
        yield found
        return

    def noting(self: Any, symbol: Any, target: Any, *rest: Any) -> Any:
        if getattr(target, "is_number", False):
            found.setdefault(str(symbol), extract_stack())
        return original(self, symbol, target, *rest)

    setattr(ShapeEnv, _FIXING, noting)
    try:
        yield found
    finally:
        setattr(ShapeEnv, _FIXING, original)


def symbol_before(value: Any, place: int, axis: int) -> str | None:
    """The symbol that an axis of the argument at this place had before it was taken for a number."""
    shape_env = getattr(getattr(value, "fake_mode", None), "shape_env", None)
    sources = getattr(shape_env, "source_to_var", {})
    return next((str(symbol) for source, symbol in sources.items() if str(source).endswith(f"[{place}].size()[{axis}]")), None)


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def flat_tuple(length: int) -> Any:
    """PyTorch's description of a tuple of so many values."""
    return pytree.tree_flatten(tuple(range(length)))[1]
