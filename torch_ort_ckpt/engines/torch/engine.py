"""`TorchEngine`: PyTorch executes the graphs, autograd computes the gradients. See `Engine` for the methods.

Random numbers come from torch's own generator, as for any PyTorch module, so that activation checkpointing and saved RNG states work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
import torch

from ...checkpoint.state import split_half_suffix
from ...errors import CheckpointError, MissingFileError, UnsupportedError
from ...graphs.artifacts import Artifacts
from ...graphs.description import TensorSpec, load_model
from ...graphs.translation.precision import in_any_type, model_type
from ...graphs.translation.translate import Translation, translate
from ...pytorch_private import is_distributed, keeps_graph
from .. import EngineOptions, Tensors
from ..ort.gradients import refuse_second_derivative, scale, spent
from ..ort.labels import GivenLabels, recorded_labels


class TorchEngine:
    """Both graphs are translated at once, so that an operator without translation fails early; `options.compile` passes them to
    `torch.compile`."""

    name = "torch"
    reason = f"PyTorch {torch.__version__}"
    differentiable = True
    runs_optimizer_graph = False
    prefers_adjacent_parameters = False

    def __init__(self, artifacts: Artifacts, options: EngineOptions) -> None:
        self.artifacts, self.options = artifacts, options
        # Compute cached properties before torch.compile traces the forward: they take a lock when first computed.
        self._read_by_forward = artifacts.inputs, artifacts.input_gradients
        self._exported = [spec.dtype for spec in artifacts.parameters.values()]
        order = {name: place for place, name in enumerate(artifacts.parameters)}
        self._trainable = [order[name] for name in artifacts.trainable]
        self.training_graph = make_graph(artifacts, options, training=True) if artifacts.training_path else None
        self.eval_graph = make_graph(artifacts, options, training=False) if artifacts.eval_path else None

    def __repr__(self) -> str:
        return f"engine torch ({self.reason})"

    def input_specs(self, parameters: Tensors) -> Sequence[TensorSpec]:
        kind = model_type(parameters, self._exported)
        if kind is None:
            return self.artifacts.inputs
        return [replace(spec, dtype=kind) if spec.dtype is torch.float32 else spec for spec in self.artifacts.inputs]

    def train(self, inputs: Tensors, parameters: Tensors, seed: int | None) -> tuple[torch.Tensor, ...]:
        if self.training_graph is None:
            raise MissingFileError("no training_model", path=self.artifacts.folder, remedy="Call model.eval() to run the eval graph.")
        _refuse_pieces(inputs, parameters, self.artifacts)
        if self._computes_at_once(inputs, parameters):
            trainable = [parameters[place] for place in self._trainable]
            return (_AtOnce.apply(self, inputs, parameters, *trainable),)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self.training_graph(inputs, parameters)

    def _computes_at_once(self, inputs: Tensors, parameters: Tensors) -> bool:
        """Whether loss and gradients can be computed by one compiled function, before `backward` is called: a quarter faster on a
        transformer than a forward that saves tensors for a backward. Only if nothing but the loss is differentiable, with respect to
        the parameters."""
        return (
            self.options.compile
            and len(self.artifacts.outputs) == 1
            and not torch.is_autocast_enabled(self.options.device.type)
            and not torch.compiler.is_compiling()
            and not any(value.requires_grad for value in inputs)
            and all(type(value) is torch.nn.Parameter or not value.requires_grad for value in parameters)
            and any(parameters[place].requires_grad for place in self._trainable)
        )

    def step(
        self, inputs: Tensors, parameters: Tensors, seed: int | None, reuse: Tensors | None = None
    ) -> tuple[tuple[torch.Tensor, ...], Tensors]:
        _refuse_pieces(inputs, parameters, self.artifacts)
        if self.options.compile and self.training_graph is not None:
            values = [parameter.detach() for parameter in parameters]
            self.training_graph.prepare(inputs, values)
            try:
                outputs, gradients = self._compiled_step(list(inputs), values)
            except _USUAL_ERRORS as error:
                raise self.training_graph.explained(error, inputs) from error
            return outputs, independent(gradients, [*inputs, *values, *outputs])
        with torch.enable_grad():
            outputs = self.train(inputs, parameters, seed)
            trainable = [parameters[place] for place in self._trainable]
            chosen = [place for place, parameter in enumerate(trainable) if parameter.requires_grad]
            found = torch.autograd.grad(outputs[0], [trainable[place] for place in chosen], allow_unused=True)
        gradients = [torch.zeros(())] * len(trainable)
        for place, gradient in zip(chosen, found, strict=True):
            gradients[place] = torch.zeros_like(trainable[place]) if gradient is None else gradient
        outputs = tuple(output.detach() for output in outputs)
        return outputs, independent(gradients, [*inputs, *parameters, *outputs])

    @cached_property
    def _compiled_step(self) -> Callable[..., Any]:
        """Loss and gradients as one compiled function, without a separate backward."""
        graph, places = self.training_graph, self._trainable
        assert graph is not None

        def outputs_and_gradients(inputs: list[torch.Tensor], parameters: list[torch.Tensor]) -> Any:
            def loss_of(trainable: list[torch.Tensor]) -> Any:
                values = list(parameters)
                for place, value in zip(places, trainable, strict=True):
                    values[place] = value
                outputs = graph.plain(inputs, values)
                return outputs[0], outputs

            gradients, outputs = torch.func.grad(loss_of, has_aux=True)([parameters[place] for place in places])
            return outputs, gradients

        return torch.compile(outputs_and_gradients)

    def evaluate(self, inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        if self.eval_graph is None:
            raise MissingFileError("no eval_model, which eval() and no_grad() need", path=self.artifacts.folder, remedy="Export one.")
        _refuse_pieces(inputs, parameters, self.artifacts)
        return self.eval_graph(inputs, parameters)


class _AtOnce(torch.autograd.Function):
    """Forward computes loss and gradients; backward returns the gradients."""

    @staticmethod
    def forward(ctx: Any, engine: TorchEngine, inputs: Tensors, parameters: Tensors, *_: Any) -> Any:
        (loss,), ctx.gradients = engine.step(inputs, parameters, None)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> Any:
        refuse_second_derivative("Use compile=False.")
        if ctx.gradients is None:
            raise spent()
        if keeps_graph():
            gradients = [gradient.clone() for gradient in ctx.gradients]
        else:
            gradients, ctx.gradients = ctx.gradients, None
        scale(gradients, grad_loss)
        needed = ctx.needs_input_grad[3:]
        return (None, None, None, *(gradient if wanted else None for gradient, wanted in zip(gradients, needed, strict=True)))


def independent(gradients: Tensors, others: Tensors) -> list[torch.Tensor]:
    """Gradients that may be changed in place: autograd's may be one tensor for several parameters, or the batch itself."""
    taken, places = {_storage(value) for value in others}, set()
    found = []
    for gradient in gradients:
        if type(gradient) is torch.Tensor:
            if not gradient.is_contiguous() or gradient.data_ptr() in places or _storage(gradient) in taken:
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            places.add(gradient.data_ptr())
        found.append(gradient)
    return found


def _refuse_pieces(inputs: Tensors, parameters: Tensors, artifacts: Artifacts) -> None:
    """Raise for sharded parameters, which can't be used together with the plain tensors of a batch."""
    for place, value in enumerate(parameters):
        if type(value) is not torch.nn.Parameter and is_distributed(value) and not all(is_distributed(given) for given in inputs):
            raise UnsupportedError(
                "is a DTensor, of which this process holds only a shard",
                field=list(artifacts.parameters)[place],
                remedy="Call the model itself, model(...), which gathers what fully_shard has sharded; train_step does not.",
            )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else 0


_USUAL_ERRORS = (RuntimeError, IndexError, ValueError, TypeError)


def could_not_run(error: Exception) -> Exception:
    """What to raise for an error of PyTorch's operators; special types (out of memory, tracing) are left to the caller."""
    if type(error) not in (*_USUAL_ERRORS, NotImplementedError):
        return error
    return CheckpointError(
        f"PyTorch could not run the graph: {str(error).strip()}",
        remedy="Check shapes, types and labels of the inputs against model.artifacts.inputs.",
    )


@dataclass
class TorchGraph:
    """A translated graph and where its arguments are among the artifacts' inputs and parameters."""

    translation: Translation
    inputs: list[int]
    parameters: list[tuple[int, torch.dtype | None]]
    """Place among the artifacts' parameters, and the type of a half-precision alias."""
    exported: list[torch.dtype | None]
    """The types of the arguments that the graph was exported with."""
    compile: bool
    borrowed: list[int]
    """Outputs that may be views of an argument: they are copied, so that results don't change with the argument."""
    labels: list[GivenLabels] = field(default_factory=list)
    _variants: dict[bool, tuple[Callable[..., Any], Callable[..., Any]]] = field(default_factory=dict)

    def __call__(self, inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        arguments = self.arguments(inputs, parameters)
        run = self._functions(arguments)[0]
        try:
            outputs: tuple[torch.Tensor, ...] = run(*arguments)
        except _USUAL_ERRORS as error:
            raise self.explained(error, inputs) from error
        if self.borrowed:
            return tuple(output.clone() if place in self.borrowed else output for place, output in enumerate(outputs))
        return outputs

    def explained(self, error: Exception, inputs: Tensors) -> Exception:
        """What to raise for an error of PyTorch's operators: often a label is out of range."""
        for labels in self.labels:
            try:
                labels.check(inputs)
            except CheckpointError as found:
                return found
        return could_not_run(error)

    def plain(self, inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        """The same, never compiled on its own."""
        arguments = self.arguments(inputs, parameters)
        outputs: tuple[torch.Tensor, ...] = self._functions(arguments)[1](*arguments)
        return outputs

    def prepare(self, inputs: Tensors, parameters: Tensors) -> None:
        """Create what a run with these needs, before torch.compile traces it."""
        self._functions(self.arguments(inputs, parameters))

    def _functions(self, arguments: Tensors) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """What runs on arguments of these types: compiled if asked for, and as it is."""
        other = any(value.dtype is not dtype and value.is_floating_point() for value, dtype in zip(arguments, self.exported, strict=True))
        if other not in self._variants:
            module = in_any_type(self.translation.module) if other else self.translation.module
            # GraphModule.__call__ only adds a traceback on errors; the forward itself is the function.
            self._variants[other] = torch.compile(module) if self.compile else module.forward, module.forward
        return self._variants[other]

    def arguments(self, inputs: Tensors, parameters: Tensors) -> list[torch.Tensor]:
        arguments = [inputs[place] for place in self.inputs]
        for place, half in self.parameters:
            arguments.append(parameters[place] if half is None else parameters[place].to(half))
        return arguments


def make_graph(artifacts: Artifacts, options: EngineOptions, *, training: bool) -> TorchGraph:
    """Translate the training or the eval graph of these artifacts."""
    path = artifacts.training_path if training else artifacts.eval_path
    model = artifacts.training if training else artifacts.eval
    if path is None or model is None:
        raise UnsupportedError("only ONNX Runtime reads the .ort format", path=path, remedy='Use the .onnx file, or engine="ort".')
    order = list(artifacts.parameters)
    names = [*order, *artifacts.aliases]
    outputs = [spec.name for spec in (artifacts.outputs if training else artifacts.eval_outputs)]
    translation = translate(_with_weights(model, path), parameters=names, outputs=outputs)
    translation.module.to(options.device)
    specs: list[TensorSpec] = artifacts.inputs
    places = {spec.name: place for place, spec in enumerate(specs)}
    parameters = [
        (order.index(artifacts.aliases[name]), split_half_suffix(name)[1]) if name in artifacts.aliases else (order.index(name), None)
        for name in translation.parameters
    ]
    inputs = [places[name] for name in translation.inputs]
    exported = [specs[place].dtype for place in inputs]
    exported += [half or artifacts.parameters[order[place]].dtype for place, half in parameters]
    borrowed = borrowed_outputs(model.graph, outputs)
    return TorchGraph(translation, inputs, parameters, exported, options.compile, borrowed, recorded_labels(model, specs))


_MAY_BE_VIEWS = frozenset(
    {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split", "Expand", "Gather"}
    | {"Cast", "CastLike", "Dropout", "Concat", "Sum", "Max", "Min", "Mean", "Pad", "Tile", "Clip"}
)


def borrowed_outputs(graph: onnx.GraphProto, outputs: list[str]) -> list[int]:
    """Which outputs may alias one of the graph's inputs."""
    producers = {name: node for node in graph.node for name in node.output}
    found = []
    for place, name in enumerate(outputs):
        while name in producers and producers[name].op_type in _MAY_BE_VIEWS and producers[name].input:
            name = producers[name].input[0]
        if name not in producers:
            found.append(place)
    return found


def _with_weights(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    external = any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer)
    return load_model(path, weights=True) if external else model
