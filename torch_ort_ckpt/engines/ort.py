"""ONNX Runtime executes the graphs, on memory that PyTorch owns.

The training graph computes loss and gradients in one run. Gradients are written into a flat buffer of a small pool; each buffer has its
own IOBinding with its outputs bound once. A buffer is free again when nobody outside refers to its storage.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..artifacts import Artifacts
from ..dtypes import short_name
from ..errors import CheckpointError, MissingDependencyError, MissingFileError, UnsupportedError
from ..graphs import (
    ACCUMULATION_BUFFER,
    TensorSpec,
    add_shape_outputs,
    batch_norms,
    direct_gradient_names,
    direct_gradients,
    fix_dimensions,
    model_bytes,
    refuse_crashes,
)
from ..runtime.dlpack import as_input, from_ort, to_ort
from ..state import split_half_suffix
from . import EngineOptions, Tensors, cuda
from .gradients import GradientBuffer, GradientPool, Lease

__all__ = ["OrtEngine", "describe_session"]


class OrtEngine:
    """See `Engine`. Sessions are made when first needed."""

    name = "ort"
    differentiable = False

    def __init__(self, artifacts: Artifacts, options: EngineOptions) -> None:
        self.artifacts, self.options = artifacts, options
        self._lock = threading.RLock()
        self._training: _TrainingGraph | None = None
        self._eval: _EvalGraph | None = None
        if options.device.type == "cuda":
            device = cuda.check(options.device, _import_onnxruntime().get_available_providers())
            self.options = dataclasses.replace(options, device=device)
        elif options.device.type != "cpu":
            raise UnsupportedError(f"ONNX Runtime runs on cpu and cuda, not on {options.device}", remedy='Use engine="torch".')
        _import_onnxruntime()

    def train(self, inputs: Tensors, parameters: Tensors, seed: int | None) -> tuple[torch.Tensor, ...]:
        graph = self.training_graph()
        trainable = [parameters[index] for index in graph.trainable]
        outputs: tuple[torch.Tensor, ...] = _Gradients.apply(graph, inputs, parameters, seed, *trainable)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return outputs

    def step(self, inputs: Tensors, parameters: Tensors, seed: int | None) -> tuple[tuple[torch.Tensor, ...], Tensors]:
        graph = self.training_graph()
        buffer, lease, outputs = graph.run(inputs, parameters, seed)
        if graph.aliases:  # half-precision gradients: the masters get them in their own precision
            dtypes = [parameters[index].dtype for index in graph.trainable]
            return outputs, [view.to(dtype) for view, dtype in zip(buffer.views(lease), dtypes, strict=True)]
        return outputs, buffer.steady_views()

    def step_into(
        self, gradients: Tensors, inputs: Tensors, parameters: Tensors, seed: int | None
    ) -> tuple[tuple[torch.Tensor, ...], Tensors]:
        """As `step`, writing over gradients that an earlier step returned: nothing is looked up or handed out anew."""
        graph = self.training_graph()
        buffer = graph.pool.owner_of(gradients)
        if buffer is None:
            return self.step(inputs, parameters, seed)
        return graph.execute(buffer.binding, inputs, parameters, seed), gradients

    def evaluate(self, inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        with self._lock:
            if self._eval is None:
                self._eval = _EvalGraph(self.artifacts, self.options)
        return self._eval.run(inputs, parameters)

    def training_graph(self) -> _TrainingGraph:
        if self._training is None:
            with self._lock:
                if self._training is None:
                    self._training = _TrainingGraph(self.artifacts, self.options)
        return self._training


class _Gradients(torch.autograd.Function):
    """Forward runs forward and backward at once; backward hands the gradients out."""

    @staticmethod
    def forward(ctx: Any, graph: _TrainingGraph, inputs: Tensors, parameters: Tensors, seed: int | None, *trainable: Any) -> Any:
        ctx.buffer, ctx.lease, outputs = graph.run(inputs, parameters, seed)
        ctx.dtypes = None if not graph.aliases else [parameter.dtype for parameter in trainable]
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor | None, *_: Any) -> Any:
        needed = ctx.needs_input_grad[4:]
        if grad_loss is None:
            return (None, None, None, None, *(None for _ in needed))
        if ctx.lease is None:
            raise UnsupportedError(
                "backward through the same forward a second time",
                remedy="Pass retain_graph=True to the first backward, or run the model again.",
            )
        buffer, keep = ctx.buffer, torch._C._autograd._get_current_graph_task_keep_graph()
        if keep:
            flats = [flat.clone() for flat in ctx.lease]
        else:
            flats, ctx.lease, ctx.buffer = ctx.lease, None, None
        if grad_loss.device.type != "cpu" or grad_loss.item() != 1.0:
            torch._foreach_mul_(flats, grad_loss.reshape(()))
        gradients = buffer.views(flats)
        if ctx.dtypes is not None:
            gradients = [gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)]
        if not all(needed):
            gradients = [gradient if wanted else None for gradient, wanted in zip(gradients, needed, strict=True)]
        # AccumulateGrad takes a gradient without copying it only if nobody else refers to it.
        del flats
        return (None, None, None, None, *gradients)


class _Session:
    """One InferenceSession and which of its inputs are the user's, which parameters, and which half-precision aliases of parameters."""

    def __init__(self, model: bytes | str, artifacts: Artifacts, options: EngineOptions, names: set[str]) -> None:
        self.session = make_session(model, options)
        self.device = options.device
        self.stream = cuda.current_stream(options.device) if options.device.type == "cuda" else None
        self.run_options = cuda.run_options(_import_onnxruntime()) if self.stream is not None else None
        self.specs = list(artifacts.parameters.values())
        self.inputs = [spec.name if spec.name in names else None for spec in artifacts.inputs]
        self.parameters = [(index, name) for index, name in enumerate(artifacts.parameters) if name in names]
        order = list(artifacts.parameters)
        self.aliases = [
            (order.index(master), alias, split_half_suffix(alias)[1]) for alias, master in artifacts.aliases.items() if alias in names
        ]


class Binding:
    """An IOBinding that remembers what it is bound to, and binds again only what has moved."""

    def __init__(self, owner: _Session, outputs: Sequence[str]) -> None:
        from onnxruntime.capi import _pybind_state as ort

        self.owner = owner
        self.io = ort.SessionIOBinding(owner.session._sess)
        for name in outputs:
            self.io.bind_output(name, _ort_device(owner.device))
        self._count = len(outputs)
        self._indices = [index for index, _ in owner.parameters]
        self._all = self._indices == list(range(len(owner.specs)))
        self._pointers: list[int] = [-1] * len(self._indices)
        self._aliases: list[torch.Tensor] | None = None

    def bind(self, inputs: Tensors, parameters: Tensors) -> None:
        for name, value in zip(self.owner.inputs, inputs, strict=True):
            if name is not None:
                self.io.bind_ortvalue_input(name, to_ort(as_input(value)))
        tensors = parameters if self._all else [parameters[index] for index in self._indices]
        # A parameter may have been swapped for a transposed view of itself: same pointer, other meaning.
        pointers = [tensor.data_ptr() if tensor.is_contiguous() else 0 for tensor in tensors]
        if pointers != self._pointers:
            for position, (old, new) in enumerate(zip(self._pointers, pointers, strict=True)):
                if old != new or not new:
                    index, name = self.owner.parameters[position]
                    self.io.bind_ortvalue_input(name, to_ort(as_input(_checked(tensors[position], self.owner.specs[index]))))
            self._pointers = [pointer or -1 for pointer in pointers]
        if self.owner.aliases:
            self._refresh_aliases(parameters)

    def run(self) -> list[torch.Tensor]:
        """Execute; returns the outputs named at construction, in memory of their own."""
        try:
            if self.owner.stream is None:
                self.owner.session._sess.run_with_iobinding(self.io, None)
            else:
                with cuda.ordered(self.owner.stream):
                    self.owner.session._sess.run_with_iobinding(self.io, self.owner.run_options)
        except ort_errors() as error:
            raise CheckpointError(f"ONNX Runtime could not run the graph: {error}") from error
        values = self.io.get_outputs()
        return [from_ort(values[index]) for index in range(self._count)]

    def _refresh_aliases(self, parameters: Tensors) -> None:
        """Half-precision aliases follow their masters, whoever changed them since the last run."""
        masters = [parameters[index].detach() for index, _, _ in self.owner.aliases]
        if self._aliases is None:
            self._aliases = [master.to(dtype) for master, (_, _, dtype) in zip(masters, self.owner.aliases, strict=True)]
            for alias, (_, name, _) in zip(self._aliases, self.owner.aliases, strict=True):
                self.io.bind_ortvalue_input(name, to_ort(alias))
        torch._foreach_copy_(self._aliases, masters)


class _TrainingGraph(_Session):
    def __init__(self, artifacts: Artifacts, options: EngineOptions) -> None:
        if artifacts.training_path is None:
            raise MissingFileError("no training_model", path=artifacts.folder, remedy="Call model.eval() to run the eval graph.")
        model = artifacts.training
        if model is None:
            raise UnsupportedError("a training model in .ort format", path=artifacts.training_path, remedy="Use training_model.onnx.")
        refuse_crashes(model, options.dimensions, artifacts.training_path)
        norms = batch_norms(model) if options.device.type == "cpu" else []
        gradients = direct_gradient_names(model)
        changed = direct_gradients(fix_dimensions(model, options.dimensions))
        shapes = add_shape_outputs(changed, [norm.source for norm in norms])
        super().__init__(model_bytes(changed, artifacts.training_path), artifacts, options, {value.name for value in changed.graph.input})
        order = list(artifacts.parameters)
        self.trainable = [order.index(name) for name in artifacts.trainable]
        self.gradients = [gradients[spec.name.removesuffix(ACCUMULATION_BUFFER)] for spec in artifacts.gradients.values()]
        self.gradient_specs = [_fixed(spec, artifacts) for spec in artifacts.gradients.values()]
        self.outputs = [*(spec.name for spec in artifacts.outputs), *shapes]
        self.statistics = [(order.index(norm.variance), norm.momentum) for norm in norms]
        self.pool = GradientPool(self._new_buffer)

    def run(self, inputs: Tensors, parameters: Tensors, seed: int | None) -> tuple[GradientBuffer, Lease, tuple[torch.Tensor, ...]]:
        buffer, lease = self.pool.take()
        return buffer, lease, self.execute(buffer.binding, inputs, parameters, seed)

    def execute(self, binding: Binding, inputs: Tensors, parameters: Tensors, seed: int | None) -> tuple[torch.Tensor, ...]:
        binding.bind(inputs, parameters)
        before = [parameters[index].clone() for index, _ in self.statistics]
        if seed is not None:
            set_seed(seed)
        outputs = binding.run()
        if self.statistics:
            count = len(self.statistics)
            self._unbias(parameters, before, outputs[-count:])
            outputs = outputs[:-count]
        return tuple(outputs)

    def _unbias(self, parameters: Tensors, before: list[torch.Tensor], shapes: Sequence[torch.Tensor]) -> None:
        """PyTorch keeps the unbiased variance in its running statistics, ORT's CPU kernel the biased one."""
        for (index, momentum), old, shape in zip(self.statistics, before, shapes, strict=True):
            batch, _, *space = shape.tolist()
            count = batch * math.prod(space)
            if count > 1:
                kept = old.mul_(momentum)
                parameters[index].sub_(kept).mul_(count / (count - 1)).add_(kept)

    def _new_buffer(self) -> GradientBuffer:
        buffer = GradientBuffer(self.gradient_specs, self.device)
        binding = Binding(self, self.outputs)
        for name, view in zip(self.gradients, buffer.views(buffer.lease()), strict=True):
            binding.io.bind_ortvalue_output(name, to_ort(view))
        buffer.binding = binding
        return buffer


class _EvalGraph(_Session):
    def __init__(self, artifacts: Artifacts, options: EngineOptions) -> None:
        if artifacts.eval_path is None:
            raise MissingFileError(
                "no eval_model, which eval() and no_grad() need", path=artifacts.folder, remedy="Export the artifacts with an eval model."
            )
        model = str(artifacts.eval_path) if artifacts.eval is None else model_bytes(artifacts.eval, artifacts.eval_path)
        super().__init__(model, artifacts, options, {spec.name for spec in artifacts.eval_inputs})
        self.outputs = [spec.name for spec in artifacts.eval_outputs]
        self._free: list[Binding] = []

    def run(self, inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        try:
            binding = self._free.pop()  # atomic: threads never share a binding
        except IndexError:
            binding = Binding(self, self.outputs)
        binding.bind(inputs, parameters)
        outputs = binding.run()
        self._free.append(binding)
        return tuple(outputs)


def make_session(model: bytes | str, options: EngineOptions) -> Any:
    """An InferenceSession with the settings a training loop needs."""
    onnxruntime = _import_onnxruntime()
    settings = options.session_options or onnxruntime.SessionOptions()
    if options.session_options is None:
        settings.log_severity_level = 3
        # Spinning ORT threads and PyTorch's OpenMP threads would take the cores from each other.
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if options.threads is not None:
            settings.intra_op_num_threads = options.threads
    # Packed copies of the weights would go stale with the first optimizer step.
    settings.add_session_config_entry("session.disable_prepacking", "1")
    for name, size in options.dimensions.items():
        settings.add_free_dimension_override_by_name(name, size)
    try:
        if options.device.type != "cuda":
            return onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
        stream = cuda.current_stream(options.device).cuda_stream
        chosen = cuda.provider_options(options.device, stream, options.provider_options)
        session = onnxruntime.InferenceSession(model, settings, providers=[(cuda.PROVIDER, chosen), "CPUExecutionProvider"])
        cuda.loaded(session.get_providers())
        return session
    except ort_errors() as error:
        path = model if isinstance(model, str) else None
        raise CheckpointError(f"ONNX Runtime refuses the graph: {error}", path=path) from error


def describe_session(path: str, side: str) -> list[TensorSpec]:
    """Inputs or outputs of a model that only ORT can read (`.ort`)."""
    session = make_session(path, EngineOptions())
    found = session.get_inputs() if side == "input" else session.get_outputs()
    return [
        TensorSpec(value.name, _DTYPES.get(value.type), tuple(size if size is not None else "?" for size in value.shape)) for value in found
    ]


def ort_errors() -> tuple[type[Exception], ...]:
    """ORT's exceptions have no common root but `Exception`."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    names = ("EPFail", "EngineError", "Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "ModelLoaded", "NoModel", "NoSuchFile")
    own = [getattr(state, name) for name in (*names, "NotImplemented", "RuntimeException") if hasattr(state, name)]
    return (RuntimeError, ValueError, *own)


def set_seed(seed: int) -> None:
    """Every random number ORT draws next follows from this (process-wide)."""
    import onnxruntime

    onnxruntime.set_seed(seed)


_DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(uint8)": torch.uint8,
    "tensor(bool)": torch.bool,
}


def _fixed(spec: TensorSpec, artifacts: Artifacts) -> tuple[torch.dtype, tuple[int, ...]]:
    shape = tuple(size for size in spec.shape or () if isinstance(size, int))
    if spec.dtype is None or spec.shape is None or len(shape) != len(spec.shape):
        raise UnsupportedError("a gradient without a fixed shape", path=artifacts.training_path, field=spec.name)
    return spec.dtype, shape


def _checked(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if tensor.dtype != spec.dtype and spec.dtype is not None:
        raise UnsupportedError(
            f"is {short_name(tensor.dtype)} now, the graph computes with {short_name(spec.dtype)}",
            field=spec.name,
            remedy=f"Call model.to(torch.{short_name(spec.dtype)}); for half precision export the artifacts so.",
        )
    return tensor


def _ort_device(device: torch.device) -> Any:
    from onnxruntime.capi import _pybind_state as ort

    kind = ort.OrtDevice.cuda() if device.type == "cuda" else ort.OrtDevice.cpu()
    return ort.OrtDevice(kind, ort.OrtDevice.default_memory(), device.index or 0)


def _import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            f"ONNX Runtime is not installed ({error})", remedy='pip install "torch-ort-ckpt[ort]", or use engine="torch".'
        ) from error
    return onnxruntime
