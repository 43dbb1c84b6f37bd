"""Stage 2: `torch.export` captures the module with its loss, with the sizes that were asked for left open."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from traceback import StackSummary
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...errors import CheckpointError, UnsupportedError
from .averaging_norm import use_tensors
from .decompositions import while_exporting
from .private_export import noting_fixed_sizes
from .where import first_line, line_of_error
from .with_loss import Example, WithLoss

_log = logging.getLogger(__name__)

TRACING_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ImportError, ArithmeticError)
"""What user code and PyTorch's tracers raise; always converted to our errors, with the line of the user's code."""

Dynamic = Mapping[str, Mapping[int, str]]
"""Input -> axis -> name of the dimension."""


@dataclass(frozen=True)
class Captured:
    """The program, and the names of its inputs in order."""

    program: ExportedProgram
    inputs: list[str]
    fixed: Mapping[str, StackSummary]
    """Sizes that were to stay open and became numbers: symbol -> where."""
    required: Mapping[str, Mapping[int, str]] | None = None
    """Input -> axes that must stay open; None for all that are."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """PyTorch warns about its own internals while it traces, and logs what it then raises too."""
    noisy = [logging.getLogger(name) for name in ("torch.export", "torch.fx", "torch._dynamo", "torch._functorch", "torch.onnx")]
    levels = [logger.level for logger in noisy]
    for logger in noisy:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(noisy, levels, strict=True):
            logger.setLevel(level)


def in_training_mode(module: nn.Module) -> nn.Module:
    """A copy to trace. Layers that the user put in eval mode inside a module in training mode (a frozen BatchNorm) stay so."""
    twin = copy.deepcopy(module).cpu()
    use_tensors(twin)
    return twin if twin.training else twin.train()


def run_once(wrapped: WithLoss, example: Example) -> Any:
    """What the module returns for the example, without a change to its buffers or to PyTorch's random numbers."""
    with _unchanged(wrapped), torch.no_grad():
        try:
            return wrapped.call({name: value.clone() for name, value in example.tensors.items()})
        except TRACING_ERRORS as error:
            raise _fails(error, "Pass inputs that its forward takes.") from error


def freeze_unused(wrapped: WithLoss, values: Sequence[torch.Tensor]) -> list[str]:
    """Parameters that get no gradient in one step stop requiring one: PyTorch makes no joint graph with them. Returns their names."""
    parameters = {name: value for name, value in wrapped.named_parameters() if value.requires_grad}
    with _unchanged(wrapped), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        try:
            loss = wrapped(*(value.clone() for value in values))[0]
        except CheckpointError:
            raise
        except TRACING_ERRORS as error:
            raise _fails(error, "Pass inputs and targets that module and loss take.") from error
        if not loss.requires_grad:
            raise CheckpointError(
                "the loss does not depend on any trainable parameter",
                remedy="Freeze fewer parameters; with loss=None, the module's first output must be its loss, not detached.",
            )
        used = _with_gradient(loss, list(parameters.values()))
    unused = [name for name, parameter in parameters.items() if id(parameter) not in used]
    for name in unused:
        parameters[name].requires_grad_(False)
    return unused


def _with_gradient(loss: torch.Tensor, parameters: Sequence[nn.Parameter]) -> set[int]:
    """The ids of the parameters that get a gradient. Each gradient is dropped at once: all of them together are as large as the weights."""
    found: set[int] = set()

    def note(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            found.add(id(parameter))
            parameter.grad = None

    values: Sequence[Any] = parameters  # PyTorch has no types for these hooks
    hooks = [value.register_post_accumulate_grad_hook(note) for value in values]
    try:
        if parameters:
            torch.autograd.backward([loss], inputs=list(parameters))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def capture(wrapped: WithLoss, values: Sequence[torch.Tensor], dynamic: Dynamic, largest: Mapping[str, int] | None = None) -> Captured:
    """The graph of loss and outputs, not yet decomposed. `largest` bounds dynamic sizes by name."""
    bounds: dict[str, Any] = {name: Dim.AUTO(max=size) for name, size in (largest or {}).items()}
    shapes = [{axis: bounds.get(size, Dim.AUTO) for axis, size in dynamic.get(name, {}).items()} for name in wrapped.names]
    with _unchanged(wrapped), quiet(), sdpa_kernel(SDPBackend.MATH), while_exporting(), noting_fixed_sizes() as fixed:
        try:
            program = torch.export.export(wrapped, tuple(values), dynamic_shapes=(tuple(shapes),), strict=False)
        except CheckpointError:
            raise
        except TRACING_ERRORS as error:
            raise UnsupportedError(
                f"torch.export can't capture the module ({first_line(error)})",
                field=line_of_error(error),
                remedy="A branch or loop must not depend on values of tensors: use torch.where, or export with sizes fixed "
                '(dynamic_shapes={}). builder="ort", exporter="torchscript" traces one path.',
            ) from error
    untie(program)
    return Captured(program, list(wrapped.names), fixed)


def untie(program: ExportedProgram) -> None:
    """Tied parameters are several placeholders of one tensor: only the first stays."""
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    changed = set(signature.buffers_to_mutate.values())
    first: dict[tuple[int, InputKind], Any] = {}
    for spec in list(signature.input_specs):
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER) or spec.target in changed or spec.target not in program.state_dict:
            continue
        kept = first.setdefault((id(program.state_dict[spec.target]), spec.kind), spec)
        if kept is not spec:
            nodes[spec.arg.name].replace_all_uses_with(nodes[kept.arg.name])
            program.graph.erase_node(nodes[spec.arg.name])
            signature.input_specs.remove(spec)
            program.state_dict.pop(spec.target)
    program.graph_module.recompile()


def grown(values: Mapping[str, torch.Tensor], dynamic: Dynamic) -> dict[str, torch.Tensor]:
    """The example with every dynamic size of 1 doubled: PyTorch takes a size of 1 for a constant."""
    single = {name for key, axes in dynamic.items() if key in values for axis, name in axes.items() if values[key].shape[axis] == 1}
    result = dict(values)
    for key, axes in dynamic.items():
        for axis, name in axes.items():
            if key in values and name in single and values[key].shape[axis] == 1:
                result[key] = torch.cat([result[key], result[key]], axis)
    return result


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Buffers and random numbers as before afterwards: running a module in training mode shifts BatchNorm's statistics."""
    before = {name: value.clone() for name, value in module.named_buffers()}
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for name, value in module.named_buffers():
                if name in before and value.shape == before[name].shape:
                    value.copy_(before[name])


def _fails(error: BaseException, remedy: str) -> UnsupportedError:
    return UnsupportedError(f"the module fails on the example inputs: {first_line(error)}", field=line_of_error(error), remedy=remedy)
