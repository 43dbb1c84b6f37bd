"""ONNX Runtime sessions: how they are created for training, and bindings of their inputs and outputs to PyTorch's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ...checkpoint.state import split_half_suffix
from ...cuda import provider
from ...cuda.devices import PROVIDER
from ...cuda.streams import Lane
from ...dtypes import short_name
from ...errors import CheckpointError, UnsupportedError
from ...graphs.artifacts import Artifacts
from ...graphs.description import TensorSpec
from ...graphs.onnxruntime_package import import_onnxruntime, ort_errors
from ...pytorch_private import foreach_copy_
from .. import EngineOptions, Tensors
from .dlpack import as_input, from_ort, has_memory, to_ort, without_memory
from .labels import NO_CHECKS, LabelChecks


class GraphSession:
    """One InferenceSession, and which of its inputs are the user's, parameters, or half-precision aliases of parameters."""

    written: Mapping[str, str] = MappingProxyType({})
    """Outputs of the graph that replace a parameter's value, by parameter name."""
    labels: LabelChecks = NO_CHECKS

    def __init__(self, model: bytes | str, artifacts: Artifacts, options: EngineOptions, names: set[str], lane: Lane | None) -> None:
        self.session = make_session(model, options, lane)
        self.device = options.device
        self.lane = lane
        self._runs = provider.Runs(import_onnxruntime()) if lane is not None else None
        self.specs = list(artifacts.parameters.values())
        self.inputs = [spec.name if spec.name in names else None for spec in artifacts.inputs]
        self.parameters = [(index, name) for index, name in enumerate(artifacts.parameters) if name in names]
        order = list(artifacts.parameters)
        self.aliases = [
            (order.index(master), alias, split_half_suffix(alias)[1]) for alias, master in artifacts.aliases.items() if alias in names
        ]

    def in_order(self) -> contextlib.AbstractContextManager[None]:
        """Binding and running, in order with PyTorch's work."""
        return self.lane.ordered() if self.lane is not None else contextlib.nullcontext()

    def run_options(self) -> Any:
        return self._runs.options() if self._runs is not None else None

    def __del__(self) -> None:
        lane: Lane | None = getattr(self, "lane", None)
        if lane is not None:
            with lane.current_device():
                del self.session

    def results(self, binding: Binding) -> tuple[torch.Tensor, ...]:
        """Run, and return the user's outputs."""
        outputs = binding.run()
        if self.lane is not None:
            self.lane.lend(outputs)
        if self.labels.reported:
            end = len(outputs) - len(self.labels.reported)
            self.labels.after(outputs[end:])
            del outputs[end:]
        return tuple(outputs)


class Binding:
    """An IOBinding that remembers what it is bound to, and rebinds only what has moved."""

    def __init__(self, owner: GraphSession, outputs: Sequence[str]) -> None:
        from onnxruntime.capi import _pybind_state as ort

        self.owner = owner
        self.io = ort.SessionIOBinding(owner.session._sess)
        self._outputs, self._device = list(outputs), ort_device(owner.device)
        self._let_go()
        fed = {*owner.inputs, *(name for _, name in owner.parameters)}
        self._borrowed = [index for index, name in enumerate(outputs) if name in fed]  # such an output is the input's own memory
        types = {value.name: value.type for value in owner.session.get_outputs()}
        self._is_bool = [types[name] == "tensor(bool)" for name in outputs]
        self._indices = [index for index, _ in owner.parameters]
        self._all = self._indices == list(range(len(owner.specs)))
        self._pointers: list[int] = [-1] * len(self._indices)
        self._values: list[Any] = [None] * len(self._indices)
        self._aliases: list[torch.Tensor] | None = None

    def bind(self, inputs: Tensors, parameters: Tensors) -> None:
        for name, value in zip(self.owner.inputs, inputs, strict=True):
            if name is not None:
                self.io.bind_ortvalue_input(name, to_ort(as_input(value)))
        tensors = parameters if self._all else [parameters[index] for index in self._indices]
        # A parameter may have been replaced by a transposed view of itself: same pointer, different layout.
        pointers = [tensor.data_ptr() if tensor.is_contiguous() else 0 for tensor in tensors]
        if pointers != self._pointers:
            for position, (old, new) in enumerate(zip(self._pointers, pointers, strict=True)):
                if old != new or not new:
                    index, name = self.owner.parameters[position]
                    value = to_ort(as_input(_checked(tensors[position], self.owner.specs[index])))
                    self.io.bind_ortvalue_input(name, value)
                    self._values[position] = value
                    if name in self.owner.written:
                        self.io.bind_ortvalue_output(self.owner.written[name], value)
            self._pointers = [pointer or -1 for pointer in pointers]
        if self.owner.lane is not None:
            # ORT keeps a copy of an input that it wants elsewhere (on the CPU, for a node without a CUDA kernel), with the value of the
            # moment of binding. Where the devices agree, binding again costs no copy.
            for (_, name), value in zip(self.owner.parameters, self._values, strict=True):
                self.io.bind_ortvalue_input(name, value)
        if self.owner.aliases:
            self._refresh_aliases(parameters)

    def run(self) -> list[torch.Tensor]:
        """Execute; returns the outputs named at construction, in memory that nothing else writes to, now or later."""
        try:
            self.owner.session._sess.run_with_iobinding(self.io, self.owner.run_options())
            values = self.io.get_outputs()
            outputs = [from_ort(values[index], is_bool) for index, is_bool in enumerate(self._is_bool)]
        except ort_errors() as error:
            raise CheckpointError(
                f"ONNX Runtime could not run the graph: {error}",
                remedy='Check shapes and types of the inputs against model.artifacts.inputs; engine="torch" may say more.',
            ) from error
        finally:
            self._let_go()
        for index in self._borrowed:
            outputs[index] = outputs[index].clone()
        return outputs

    def _let_go(self) -> None:
        """Rebind the outputs: after a run they stay bound, and the next run would overwrite them."""
        for name in self._outputs:
            self.io.bind_output(name, self._device)

    def _refresh_aliases(self, parameters: Tensors) -> None:
        """Update half-precision aliases whose masters have changed since the last run."""
        masters = [parameters[index].detach() for index, _, _ in self.owner.aliases]
        if self._aliases is None:
            self._aliases = [master.to(dtype) for master, (_, _, dtype) in zip(masters, self.owner.aliases, strict=True)]
            for alias, (_, name, _) in zip(self._aliases, self.owner.aliases, strict=True):
                self.io.bind_ortvalue_input(name, to_ort(alias))
        foreach_copy_(self._aliases, masters)


def make_session(model: bytes | str, options: EngineOptions, lane: Lane | None = None) -> Any:
    """An InferenceSession with the settings a training loop needs."""
    onnxruntime = import_onnxruntime()
    settings = options.session_options or onnxruntime.SessionOptions()
    if options.session_options is None:
        settings.log_severity_level = 3
        # Spinning within a run saves the time to wake threads; after the run it would take cores from PyTorch's threads.
        settings.add_session_config_entry("session.force_spinning_stop", "1")
        if options.threads is not None:
            settings.intra_op_num_threads = options.threads
    # Packed copies of the weights would go stale with the first optimizer step.
    settings.add_session_config_entry("session.disable_prepacking", "1")
    for name, size in options.dimensions.items():
        settings.add_free_dimension_override_by_name(name, size)
    try:
        if lane is None:
            return onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
        chosen = provider.provider_options(options.device, lane.stream.cuda_stream, options.provider_options)
        with lane.current_device():
            session = onnxruntime.InferenceSession(model, settings, providers=[(PROVIDER, chosen), "CPUExecutionProvider"])
        provider.loaded(session.get_providers())
        return session
    except ort_errors() as error:
        path = model if isinstance(model, str) else None
        raise CheckpointError(
            f"ONNX Runtime refuses the graph: {error}",
            path=path,
            remedy='engine="torch" may run it; `torch-ort-ckpt doctor` shows whether this onnxruntime can train.',
        ) from error


def set_seed(seed: int) -> None:
    """Seed ORT's random numbers (process-wide)."""
    import onnxruntime

    onnxruntime.set_seed(seed)


def ort_device(device: torch.device) -> Any:
    from onnxruntime.capi import _pybind_state as ort

    kind = ort.OrtDevice.cuda() if device.type == "cuda" else ort.OrtDevice.cpu()
    return ort.OrtDevice(kind, ort.OrtDevice.default_memory(), device.index or 0)


def _checked(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if not has_memory(tensor):
        raise without_memory(tensor, spec.name)
    if tensor.dtype != spec.dtype and spec.dtype is not None:
        raise UnsupportedError(
            f"is {short_name(tensor.dtype)} now, the graph computes with {short_name(spec.dtype)}",
            field=spec.name,
            remedy=f"Call model.to(torch.{short_name(spec.dtype)}); for half precision, export the artifacts in it.",
        )
    return tensor
