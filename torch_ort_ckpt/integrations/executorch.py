"""Training artifacts as an ExecuTorch program: loss and gradients in one `.pte` file, for PyTorch's own runtime on phones.

The joint graph is the one that ONNX Runtime gets, before its translation to ONNX. ExecuTorch's own optimizer makes the update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument

from ..errors import CheckpointError, UnsupportedError
from ..graphs.artifacts import Artifacts
from ..graphs.gradients.capture import TRACING_ERRORS, capture, freeze_unused, in_training_mode, quiet
from ..graphs.gradients.example_batch import batch_of, open_sizes
from ..graphs.gradients.joint import JointProgram, joint
from ..graphs.gradients.translate import public_name
from ..graphs.gradients.where import first_line
from ..graphs.gradients.with_loss import WithLoss, named_example
from ..graphs.source.module import to_torch_module
from ..storage.files import atomic_write
from ..storage.paths import PathLike, as_path, refuse_existing

METHOD = "forward"
OUTPUTS = "torch_ort_ckpt_outputs"
"""A method of the program that returns the names of what `forward_backward` returns: the loss, extra outputs, then changed buffers."""
LARGEST = 64


def export_executorch(
    artifacts: Artifacts | PathLike,
    path: PathLike,
    *,
    largest: int | Mapping[str, int] = LARGEST,
    example_inputs: Sequence[torch.Tensor] | None = None,
    overwrite: bool = False,
) -> None:
    """Write an ExecuTorch program (`.pte`) that computes the loss and the gradients of training artifacts.

    The program holds the parameters; ExecuTorch's `TrainingModule` runs it (`forward_backward`) and its `SGD` updates them. Their names
    are those of the artifacts: `from_torch({**to_state_dict(artifacts.state), **parameters}, like=artifacts.state)` is a checkpoint.
    The method `torch_ort_ckpt_outputs` names what `forward_backward` returns: the loss, extra outputs, changed buffers (BatchNorm's
    running statistics).

    - `largest`: the largest value of every dimension that the graph leaves open (the batch), or of each by name. ExecuTorch reserves
      memory for it.
    - `example_inputs`: a batch to trace with; by default one is made from the graph's inputs.
    """
    exir = _package()
    place = as_path(path)
    refuse_existing(place, overwrite, "program")
    source = artifacts if isinstance(artifacts, Artifacts) else Artifacts.load(artifacts)
    program = _joint(source, example_inputs, largest)
    names = _return_buffers(program, [spec.name for spec in source.outputs])
    _use_public_names(program.program)
    try:
        with quiet(), _corrected_indices():
            edge = exir.to_edge(
                program.program,
                constant_methods={OUTPUTS: names},
                compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),  # the graph keeps `detach`
            )
            made = edge.to_executorch(_config(exir, edge.exported_program()))
    except TRACING_ERRORS as error:
        raise UnsupportedError(f"ExecuTorch can't compile the gradient graph ({first_line(error)})", path=source.training_path) from error
    with atomic_write(place) as file:
        file.write(made.buffer)


def _package() -> Any:
    try:
        from executorch import exir
    except ImportError as error:
        raise UnsupportedError("needs ExecuTorch", remedy="Install torch-ort-ckpt[executorch].") from error
    return exir


def _joint(artifacts: Artifacts, example_inputs: Sequence[torch.Tensor] | None, largest: int | Mapping[str, int]) -> JointProgram:
    """The joint graph of the artifacts' forward part."""
    module = in_training_mode(to_torch_module(artifacts))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in artifacts.state.trainable)
    values = batch_of(artifacts.inputs, module) if example_inputs is None else list(example_inputs)
    example = named_example(module, tuple(values), None, None)
    wrapped = WithLoss(module, None, example)
    wrapped.outputs = list(range(1, len(artifacts.outputs)))
    traced = [example.tensors[name] for name in wrapped.names]
    freeze_unused(wrapped, traced)
    own = dict(zip([spec.name for spec in artifacts.inputs], example.tensors, strict=True))
    dynamic = {own[name]: axes for name, axes in open_sizes(artifacts.inputs).items()}
    sizes = {size for axes in dynamic.values() for size in axes.values()}
    bounds = dict.fromkeys(sizes, largest) if isinstance(largest, int) else {size: largest.get(size, LARGEST) for size in sizes}
    if odd := next((size for size, bound in bounds.items() if bound < 2), None):
        raise CheckpointError(f"must be at least 2, not {bounds[odd]}", field=f"largest: {odd}")
    if not isinstance(largest, int) and (unknown := sorted(largest.keys() - sizes)):
        raise CheckpointError(
            f"no open dimension {unknown[0]!r}", field="largest", remedy=f"There are: {', '.join(sorted(sizes)) or 'none'}."
        )
    return joint(capture(wrapped, traced, dynamic, bounds))


def _return_buffers(joint_program: JointProgram, outputs: Sequence[str]) -> list[str]:
    """Return the new values of buffers after the module's own outputs too: ExecuTorch's Python package can't read buffers.

    Returns the names of all that `forward_backward` returns.
    """
    program = joint_program.program
    signature = program.graph_signature
    updates = [spec for spec in signature.output_specs if spec.kind is OutputKind.BUFFER_MUTATION]
    node = program.graph.output_node()
    values = list(node.args[0])
    place = next(index for index, spec in enumerate(signature.output_specs) if spec.kind is OutputKind.GRADIENT_TO_PARAMETER)
    changed = [values[signature.output_specs.index(spec)] for spec in updates]
    # A copy: ExecuTorch writes the buffer itself after the value was computed, and one value can't be both.
    with program.graph.inserting_before(node):
        copies = []
        for value in changed:
            copy = program.graph.call_function(torch.ops.aten.clone.default, (value,))
            copy.meta = dict(value.meta)
            copies.append(copy)
    values[place:place] = copies
    node.args = (tuple(values),)
    signature.output_specs[place:place] = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(copy.name), None) for copy in copies]
    program.graph_module.recompile()
    return [*outputs, *(public_name(str(spec.target)) for spec in updates)]


def _use_public_names(program: ExportedProgram) -> None:
    """Call parameters and buffers as in the artifacts, not as in the wrapper that was captured."""
    for spec in (*program.graph_signature.input_specs, *program.graph_signature.output_specs):
        if isinstance(spec.target, str):
            spec.target = public_name(spec.target)
    for tensors_by_name in (program.state_dict, program.constants):
        for name in list(tensors_by_name):
            tensors_by_name[public_name(name)] = tensors_by_name.pop(name)


def _config(exir: Any, program: ExportedProgram) -> Any:
    """Buffers that a step changes start with the values they have; by default ExecuTorch starts them at zero."""
    from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass

    signature = program.graph_signature
    changed = set(signature.buffers_to_mutate.values())
    nodes = [spec.arg.name for spec in signature.input_specs if spec.target in changed]
    return exir.ExecutorchBackendConfig(passes=[InitializedMutableBufferPass(nodes)] if nodes else [])


@contextlib.contextmanager
def _corrected_indices() -> Iterator[None]:
    """Let the program say where its gradients and parameters begin among the outputs that it has.

    ExecuTorch 1.5 counts changed buffers too, which are no outputs any more when it writes the program.
    """
    from executorch.exir.emit import _emit_program

    name = "_get_training_metadata"
    original = getattr(_emit_program, name, None)
    if original is None:
        yield
        return
    removed = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)

    def corrected(methods: Mapping[str, ExportedProgram]) -> dict[str, Any]:
        found: dict[str, Any] = dict(original(methods))
        for method, program in methods.items():
            kinds = [spec.kind for spec in program.graph_signature.output_specs if spec.kind not in removed]
            for kind, text in ((OutputKind.GRADIENT_TO_PARAMETER, "gradients"), (OutputKind.TOKEN, "parameters")):
                if (key := f"__et_training_{text}_index_{method}") in found:
                    found[key] = kinds.index(kind)
        return found

    setattr(_emit_program, name, corrected)
    try:
        yield
    finally:
        setattr(_emit_program, name, original)
