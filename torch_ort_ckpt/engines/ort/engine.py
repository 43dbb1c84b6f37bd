"""ONNX Runtime executes the graphs, on memory that PyTorch owns.

The training graph computes loss and gradients in one run. Gradients are written into a flat buffer of a small pool; each buffer has its
own IOBinding with its outputs bound once. A buffer is free again when nothing else references its storage.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from typing import Any

import onnx
import torch

from ...cuda.devices import check
from ...cuda.kernels import fallbacks
from ...cuda.provider import flag_device
from ...cuda.streams import Lane
from ...errors import MissingFileError, UnsupportedError
from ...graphs.artifacts import Artifacts
from ...graphs.description import ACCUMULATION_BUFFER, ACCUMULATION_OUTPUT, LAZY_RESET, TensorSpec, all_nodes, copy_of, model_bytes
from ...graphs.limits import refuse_wrong
from ...graphs.onnxruntime_package import import_onnxruntime
from ...graphs.passes.dimensions import fix_dimensions
from ...graphs.passes.direct_gradients import direct_gradient_names, direct_gradients
from ...graphs.passes.direct_updates import direct_updates, updated_buffers
from ...graphs.passes.pipelines import AFTER_GRADIENTS, apply
from ...graphs.passes.unbiased_variance import unbias_variances, unbiased_variances
from ...graphs.passes.versions import lower_versions
from ...pytorch_private import keeps_graph
from ...storage.files import warn
from .. import EngineOptions, Tensors
from .dlpack import to_ort
from .gradients import GradientBuffer, GradientPool, Lease, refuse_second_derivative, scale, spent
from .graph_updates import runs_on
from .labels import check_labels
from .sessions import Binding, GraphSession, ort_device, set_seed

logger = logging.getLogger(__name__)


class OrtEngine:
    """See `Engine`. Sessions are made when first needed."""

    name = "ort"
    differentiable = False

    def __init__(self, artifacts: Artifacts, options: EngineOptions) -> None:
        self.artifacts, self.options = artifacts, options
        self._lock = threading.RLock()
        self._training: _TrainingGraph | None = None
        self._eval: _EvalGraph | None = None
        self._told_of_autocast = False
        self._lane: Lane | None = None
        if options.device.type == "cuda":
            device = check(options.device, import_onnxruntime().get_available_providers())
            self.options = dataclasses.replace(options, device=device)
            self._lane = Lane(device, 'Use engine="torch", or call the model outside the capture.')
        elif options.device.type != "cpu":
            raise UnsupportedError(f"ONNX Runtime runs on cpu and cuda, not on {options.device}", remedy='Use engine="torch".')
        self.prefers_adjacent_parameters = options.device.type == "cpu"
        self.runs_optimizer_graph = runs_on(options.device)
        import_onnxruntime()

    def input_specs(self, parameters: Tensors) -> list[TensorSpec]:
        return self.artifacts.inputs

    def train(self, inputs: Tensors, parameters: Tensors, seed: int | None) -> tuple[torch.Tensor, ...]:
        graph = self.training_graph()
        trainable = [parameters[index] for index in graph.trainable]
        trainable += [inputs[index] for index, _ in graph.input_gradients]
        outputs: tuple[torch.Tensor, ...] = _Gradients.apply(graph, inputs, parameters, seed, *trainable)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return outputs

    def step(
        self, inputs: Tensors, parameters: Tensors, seed: int | None, reuse: Tensors | None = None
    ) -> tuple[tuple[torch.Tensor, ...], Tensors]:
        graph = self.training_graph()
        if reuse is not None and (owner := graph.pool.owner_of(reuse)) is not None:  # no new buffer or views are needed
            return graph.execute(owner, inputs, parameters, seed), reuse
        buffer, lease, outputs = graph.run(inputs, parameters, seed)
        if graph.aliases:  # half-precision gradients: the masters get them in their own precision
            dtypes = [parameters[index].dtype for index in graph.trainable]
            return outputs, [view.to(dtype) for view, dtype in zip(buffer.views(lease), dtypes, strict=True)]
        return outputs, buffer.steady_views()

    def evaluate(self, inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        self._notice_autocast()
        return self.eval_graph().run(inputs, parameters)

    def prepare(self) -> None:
        """Create the sessions of every graph with operators of its own, so that what ORT can't run fails early."""
        if self.artifacts.training_path is not None:
            self.training_graph()
        if self.artifacts.eval_path is not None and not _operators(self.artifacts.eval) <= _operators(self.artifacts.training):
            self.eval_graph()

    def eval_graph(self) -> _EvalGraph:
        if self._lane is not None:
            self._lane.refuse_capture()
        with self._lock:
            if self._eval is None:
                self._eval = _EvalGraph(self.artifacts, self.options, self._lane)
        return self._eval

    def _notice_autocast(self) -> None:
        if not self._told_of_autocast and torch.is_autocast_enabled(self.options.device.type):
            self._told_of_autocast = True
            warn(
                'torch.autocast has no effect on engine "ort": the graph computes in the precision it was exported with. '
                'Use engine="torch", or export the artifacts in half precision.'
            )

    def training_graph(self) -> _TrainingGraph:
        self._notice_autocast()
        if self._lane is not None:
            self._lane.refuse_capture()
        if self._training is None:
            with self._lock:
                if self._training is None:
                    self._training = _TrainingGraph(self.artifacts, self.options, self._lane)
        return self._training


class _Gradients(torch.autograd.Function):
    """Forward runs forward and backward at once; backward returns the gradients."""

    @staticmethod
    def forward(ctx: Any, graph: _TrainingGraph, inputs: Tensors, parameters: Tensors, seed: int | None, *trainable: Any) -> Any:
        ctx.buffer, ctx.lease, outputs = graph.run(inputs, parameters, seed)
        ctx.buffer.drop_steady_views()
        ctx.dtypes = None if not graph.aliases else [parameter.dtype for parameter in trainable[: len(graph.trainable)]]
        if graph.input_gradients:  # saved, so that PyTorch detects in-place changes to these outputs before the backward
            ctx.save_for_backward(*(outputs[position] for _, position in graph.input_gradients))
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor | None, *_: Any) -> Any:
        refuse_second_derivative('Use engine="torch", which computes it.')
        needed = ctx.needs_input_grad[4:]
        if grad_loss is None:
            return (None, None, None, None, *(None for _ in needed))
        if ctx.lease is None:
            raise spent()
        buffer, keep = ctx.buffer, keeps_graph()
        if keep:
            flats = [flat.clone() for flat in ctx.lease]
        else:
            flats, ctx.lease, ctx.buffer = ctx.lease, None, None
        if ctx.dtypes is None:
            scale(flats, grad_loss)
            gradients = buffer.views(flats)
        else:  # half-precision gradients: to the masters' precision first, where a loss scale does not overflow
            gradients = [gradient.to(dtype) for gradient, dtype in zip(buffer.views(flats), ctx.dtypes, strict=True)]
            scale(gradients, grad_loss)
        if len(needed) > len(gradients):
            gradients = [*gradients, *(gradient * grad_loss for gradient in ctx.saved_tensors)]
        if not all(needed):
            gradients = [gradient if wanted else None for gradient, wanted in zip(gradients, needed, strict=True)]
        # AccumulateGrad takes a gradient without copying it only if there is no other reference to it.
        del flats
        return (None, None, None, None, *gradients)


class _TrainingGraph(GraphSession):
    def __init__(self, artifacts: Artifacts, options: EngineOptions, lane: Lane | None) -> None:
        if artifacts.training_path is None:
            raise MissingFileError("no training_model", path=artifacts.folder, remedy="Call model.eval() to run the eval graph.")
        order = list(artifacts.parameters)
        self.trainable = [order.index(name) for name in artifacts.trainable]
        self.gradient_specs = [_fixed(spec, artifacts.parameters[name], artifacts) for name, spec in artifacts.gradients.items()]
        self.outputs = [spec.name for spec in artifacts.outputs]
        names = [spec.name for spec in artifacts.inputs]
        self.input_gradients = [(names.index(name), self.outputs.index(output)) for name, output in artifacts.input_gradients.items()]
        # What writes a gradient: an output of its own, or (in a `.ort` model, which can't be changed) its accumulation buffer.
        self.gradients: list[str] = []
        self.buffers: list[str] = []
        if artifacts.training is None:
            self.buffers = [spec.name for spec in artifacts.gradients.values()]
            super().__init__(str(artifacts.training_path), artifacts, options, {spec.name for spec in artifacts.training_inputs}, lane)
        else:
            model = self._prepared(artifacts.training, artifacts, options)
            source = model_bytes(model, artifacts.training_path)
            super().__init__(source, artifacts, options, {value.name for value in model.graph.input}, lane)
            if lane is not None and (names := fallbacks((node.domain, node.op_type) for node in all_nodes(model.graph))):
                logger.warning("no CUDA kernel for %s: each step waits while they run on the CPU; engine torch does not", ", ".join(names))
        self.pool = GradientPool(self._new_buffer)

    def _prepared(self, model: onnx.ModelProto, artifacts: Artifacts, options: EngineOptions) -> onnx.ModelProto:
        """The training graph as it is run: with fixed dimensions, repaired, checked, and with gradients as outputs."""
        names = direct_gradient_names(model)
        self.gradients = [names[spec.name.removesuffix(ACCUMULATION_BUFFER)] for spec in artifacts.gradients.values()]
        changed = copy_of(model)
        fix_dimensions(changed, options.dimensions)
        for line in apply(changed, AFTER_GRADIENTS):
            logger.info("%s", line)
        refuse_wrong(changed, artifacts.training_path)
        direct_gradients(changed)
        self.written = updated_buffers(changed)
        direct_updates(changed)
        if options.device.type == "cpu":  # cuDNN keeps the unbiased variance, as PyTorch does
            self.written |= unbiased_variances(changed)
            unbias_variances(changed)
            self.labels = check_labels(changed, artifacts.inputs)
        lower_versions(changed)
        return changed

    def run(self, inputs: Tensors, parameters: Tensors, seed: int | None) -> tuple[GradientBuffer, Lease, tuple[torch.Tensor, ...]]:
        buffer, lease = self.pool.take()
        return buffer, lease, self.execute(buffer, inputs, parameters, seed)

    def execute(self, buffer: GradientBuffer, inputs: Tensors, parameters: Tensors, seed: int | None) -> tuple[torch.Tensor, ...]:
        self.labels.before(inputs)
        if self.lane is not None:
            self.lane.share(buffer.flats, buffer.streams)
        with self.in_order():
            buffer.binding.bind(inputs, parameters)
            if seed is not None:
                set_seed(seed)
            return self.results(buffer.binding)

    def _new_buffer(self) -> GradientBuffer:
        buffer = GradientBuffer(self.gradient_specs, self.device)
        binding = Binding(self, [*self.outputs, *self.labels.reported])
        views = buffer.views(buffer.lease())
        for name, view in zip(self.gradients or self.buffers, views, strict=True):
            if self.gradients:
                binding.io.bind_ortvalue_output(name, to_ort(view))
            else:
                binding.io.bind_ortvalue_input(name, to_ort(view))
                flag = flag_device() if self.lane is not None else ort_device(torch.device("cpu"))
                binding.io.bind_output(name.removesuffix(ACCUMULATION_BUFFER) + ACCUMULATION_OUTPUT, flag)
        if self.buffers:  # PyTorch accumulates the gradients: every run overwrites its buffer
            binding.io.bind_ortvalue_input(LAZY_RESET, to_ort(torch.ones(1, dtype=torch.bool)))  # read on the CPU, also on CUDA
        buffer.binding = binding
        return buffer


class _EvalGraph(GraphSession):
    def __init__(self, artifacts: Artifacts, options: EngineOptions, lane: Lane | None) -> None:
        if artifacts.eval_path is None:
            raise MissingFileError(
                "no eval_model, which eval() and no_grad() need", path=artifacts.folder, remedy="Export the artifacts with an eval model."
            )
        graph = artifacts.eval
        if graph is not None:
            refuse_wrong(graph, artifacts.eval_path)
            graph = copy_of(graph)
            if options.device.type == "cpu":
                self.labels = check_labels(graph, artifacts.inputs)
            lower_versions(graph)
        model = str(artifacts.eval_path) if graph is None else model_bytes(graph, artifacts.eval_path)
        super().__init__(model, artifacts, options, {spec.name for spec in artifacts.eval_inputs}, lane)
        self.outputs = [spec.name for spec in artifacts.eval_outputs]
        self._free: list[Binding] = []

    def run(self, inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        self.labels.before(inputs)
        try:
            binding = self._free.pop()  # atomic: threads never share a binding
        except IndexError:
            binding = Binding(self, [*self.outputs, *self.labels.reported])
        with self.in_order():
            binding.bind(inputs, parameters)
            outputs = self.results(binding)
        self._free.append(binding)
        return outputs


def _operators(model: onnx.ModelProto | None) -> set[tuple[str, str]]:
    """The operators whose kernels a session needs. The training graph has BatchNormalization under another name."""
    found = {(node.domain, node.op_type) for node in all_nodes(model.graph)} if model is not None else set()
    return found - {("", "BatchNormalization"), ("", "Constant"), ("", "Identity")}


def _fixed(spec: TensorSpec, parameter: TensorSpec, artifacts: Artifacts) -> tuple[torch.dtype, tuple[int, ...]]:
    """Type and shape of a gradient. Its shape is the parameter's, whatever ORT inferred for its buffer."""
    shape = tuple(size for size in parameter.shape or () if isinstance(size, int))
    if spec.dtype is None or parameter.shape is None or len(shape) != len(parameter.shape):
        raise UnsupportedError(
            "a gradient without a fixed shape", path=artifacts.training_path, field=spec.name, remedy='Use engine="torch".'
        )
    return spec.dtype, shape
