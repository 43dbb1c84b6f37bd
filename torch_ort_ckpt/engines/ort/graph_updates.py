"""The optimizer graph, run by ONNX Runtime on tensors that PyTorch owns.

The graph takes sequences of tensors. Where they can be kept (see `sequences`), a step rebinds only tensors that have moved; elsewhere
lists of numpy arrays on the same memory go through `InferenceSession.run`, which turns each of them into a tensor in every step. Tensors
that are adjacent in memory are passed as one (see `memory`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import onnx
import torch

from ...dtypes import short_name
from ...errors import CheckpointError, UnsupportedError
from ...graphs.artifacts import Artifacts, OptimizerSpec
from ...graphs.description import model_bytes
from ...graphs.onnxruntime_package import ort_errors
from .. import EngineOptions, Tensors
from ..updates import Update
from .dlpack import has_memory, to_ort
from .memory import Piece, pieces
from .sequences import available, make_sequence
from .sessions import make_session
from .versions import as_ort_loads

_KEPT = 4
"""Number of sequences kept: gradients are in the few buffers of a pool."""


class GraphUpdater:
    """Runs `optimizer_model.onnx` on the tensors' own memory, in place."""

    def __init__(self, artifacts: Artifacts, options: EngineOptions) -> None:
        if options.device.type != "cpu":
            raise UnsupportedError("the optimizer graph runs on CPU memory only", remedy="Use OrtOptimizer(fused=True).")
        self._artifacts = artifacts
        self._options = EngineOptions(threads=options.threads, session_options=options.session_options)
        self._runs: dict[OptimizerSpec, _Run] = {}
        self._built_in = artifacts.optimizer_spec
        self._default = self._run(self._built_in)

    def apply(self, update: Update) -> bool:
        run = self._default if update.hyperparameters is self._built_in else self._run(update.hyperparameters)
        try:
            updated = run.apply(update)
        except ort_errors() as error:
            raise CheckpointError(
                f"ONNX Runtime could not run the optimizer graph: {error}", remedy="OrtOptimizer(..., fused=True) does the same on PyTorch."
            ) from error
        _increment_versions(update.parameters)
        return updated

    def _run(self, spec: OptimizerSpec) -> _Run:
        """Hyper-parameters are attributes of the graph: other values need another (small) session."""
        if spec not in self._runs:
            if len(self._runs) >= 16:
                self._runs.clear()
            model, path = self._artifacts.optimizer, self._artifacts.optimizer_path
            built_in = spec == self._built_in
            if model is None:
                if not built_in:
                    raise UnsupportedError(
                        "hyper-parameters can't be changed in a .ort graph", path=path, remedy="Use optimizer_model.onnx."
                    )
                session = make_session(str(path), self._options)
            else:
                source = with_boolean_flag(model if built_in else with_hyperparameters(model, spec))
                session = make_session(model_bytes(as_ort_loads(source), path), self._options)
            self._runs[spec] = SequenceRun(session) if available() else ListRun(session)
        return self._runs[spec]


class _Run(Protocol):
    """One session of the optimizer graph."""

    def apply(self, update: Update) -> bool: ...


_Addresses = list[list[int]]
"""Of the tensors of each role."""


class _Roles:
    """The graph's inputs for the tensors of each role, cached for the few addresses they have.

    It holds no references to the tensors (a held gradient could not be reused), so it is only used for live tensors at the addresses it
    was made for. The key is the addresses of all roles together: a gradient's memory may belong to another one in the next step, and only
    together with the parameters do addresses determine the sizes.
    """

    def __init__(self, session: Any, make: Callable[[list[Piece]], Any]) -> None:
        names = {value.name for value in session.get_inputs()}
        self.names = [role for role in _ROLES if role in names]
        self._get = [_ROLES[role] for role in self.names]
        self._make = make
        self._known: dict[tuple[tuple[int, ...], ...], list[Any]] = {}

    def addresses(self, update: Update) -> _Addresses:
        """The tensors' addresses. A transposed view has the same address as the tensor, so it is refused here."""
        found = [list(map(_address, get(update))) for get in self._get]
        if not (all(map(_is_contiguous, update.parameters)) and all(map(_is_contiguous, update.gradients))):
            raise _refusal("strided")
        return found

    def of(self, addresses: _Addresses, update: Update) -> list[Any]:
        key = tuple(map(tuple, addresses))
        if key not in self._known:
            for get in self._get:
                for tensor in get(update):
                    if not has_memory(tensor):
                        raise _refusal(type(tensor).__name__)
                    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
                        raise _refusal("strided" if tensor.dtype is torch.float32 else short_name(tensor.dtype))
            if len(self._known) >= _KEPT:
                self._known.clear()
            # Clipping sums the norms of the tensors: joined tensors would be summed in a different order.
            joined = update.hyperparameters.max_norm is None and update.hyperparameters.known
            sizes = [parameter.numel() for parameter in update.parameters]
            self._known[key] = [self._make(own) for own in pieces(addresses, sizes, join=joined)]
        return self._known[key]


class SequenceRun:
    """Sequences on the tensors' memory, bound until a tensor moves."""

    def __init__(self, session: Any) -> None:
        from onnxruntime.capi import _pybind_state as ort

        self._session = session._sess
        self._io = ort.SessionIOBinding(self._session)
        scalars = torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
        self._lr, self._step, self._flag = (scalar.numpy() for scalar in scalars)  # cheaper to set and read than the tensors
        self._io.bind_ortvalue_output(session.get_outputs()[0].name, to_ort(scalars[2]))
        names = {value.name for value in session.get_inputs()}
        for name, scalar in zip(("learning_rate", "step"), scalars, strict=False):
            if name in names:
                self._io.bind_ortvalue_input(name, to_ort(scalar))
        self._roles = _Roles(session, make_sequence)
        self._bound: _Addresses = []

    def apply(self, update: Update) -> bool:
        self._lr[0], self._step[0] = update.lr, update.step
        addresses = self._roles.addresses(update)
        if addresses != self._bound:
            for role, value in zip(self._roles.names, self._roles.of(addresses, update), strict=True):
                self._io.bind_ortvalue_input(role, value)
            self._bound = addresses
        self._session.run_with_iobinding(self._io, None)
        return bool(self._flag[0])


class ListRun:
    """Lists of numpy arrays on the tensors' memory."""

    def __init__(self, session: Any) -> None:
        self._session = session._sess
        names = {value.name for value in session.get_inputs()}
        self._scalars = [name for name in ("learning_rate", "step") if name in names]
        self._outputs = [session.get_outputs()[0].name]
        self._roles = _Roles(session, lambda own: [_array(piece) for piece in own])

    def apply(self, update: Update) -> bool:
        scalars = {"learning_rate": np.array([update.lr], np.float32), "step": np.array([update.step], np.int64)}
        feeds: dict[str, Any] = {name: scalars[name] for name in self._scalars}
        feeds.update(zip(self._roles.names, self._roles.of(self._roles.addresses(update), update), strict=True))
        (updated, *_) = self._session.run(self._outputs, feeds, None)
        return bool(np.asarray(updated).reshape(-1)[0])


_ROLES: dict[str, Callable[[Update], Tensors]] = {
    "params": attrgetter("parameters"),
    "gradients": attrgetter("gradients"),
    "first_order_moments": lambda update: update.first or update.parameters,  # SGD declares them but does not use them
    "second_order_moments": attrgetter("second"),
}

_address, _is_contiguous = torch.Tensor.data_ptr, torch.Tensor.is_contiguous


def with_hyperparameters(model: onnx.ModelProto, spec: OptimizerSpec) -> onnx.ModelProto:
    """The same optimizer graph with different attributes."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    values = {"alpha": spec.betas[0], "beta": spec.betas[1], "epsilon": spec.eps, "weight_decay": spec.weight_decay}
    for node in changed.graph.node:
        if node.op_type == "AdamWOptimizer":
            kept = [item for item in node.attribute if item.name not in values]
            del node.attribute[:]
            node.attribute.extend([*kept, *(onnx.helper.make_attribute(name, float(value)) for name, value in values.items())])
    return changed


def _increment_versions(tensors: Tensors) -> None:
    """Tell autograd that the tensors changed: it does not see writes by ORT."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except TypeError:  # PyTorch 2.4 accepts one tensor at a time
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


def with_boolean_flag(model: onnx.ModelProto) -> onnx.ModelProto:
    """ORT 1.14 and 1.15 declared the output that says whether an update took place as int64; later releases refuse such a graph."""
    flags = {node.output[0] for node in model.graph.node if node.op_type == "AdamWOptimizer"}
    if not any(value.name in flags and value.type.tensor_type.elem_type == onnx.TensorProto.INT64 for value in model.graph.output):
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for value in changed.graph.output:
        if value.name in flags:
            value.type.tensor_type.elem_type = onnx.TensorProto.BOOL
    return changed


def _refusal(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the optimizer graph takes contiguous float32 tensors, not {what} ones", remedy="Use OrtOptimizer(fused=True)."
    )


def _array(piece: Piece) -> Any:
    address, count = piece
    if not count:
        return np.empty(0, np.float32)
    return np.frombuffer(memoryview((ctypes.c_float * count).from_address(address)), np.float32)
