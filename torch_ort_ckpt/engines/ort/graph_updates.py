"""The optimizer graph, run by ONNX Runtime on tensors that PyTorch owns.

The graph takes sequences of tensors. Where they can be kept (see `sequences`), a step rebinds only tensors that have moved; elsewhere
lists of numpy arrays on the same memory go through `InferenceSession.run`, which turns each of them into a tensor in every step. Tensors
that are adjacent in memory are passed as one (see `memory`).

On CUDA the sequences hold the device's memory: nothing is copied, and the host does not wait. Learning rate, step and the flag that says
whether an update took place stay in the host's memory, where the kernels want them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch

from ...cuda.provider import Runs, flag_device
from ...cuda.streams import Lane
from ...dtypes import short_name
from ...errors import CheckpointError, UnsupportedError
from ...graphs.artifacts import Artifacts, OptimizerSpec
from ...graphs.description import copy_of, model_bytes
from ...graphs.onnxruntime_package import import_onnxruntime, ort_errors
from ...graphs.optimizer import FIRST_MOMENTS, GRADIENTS, LEARNING_RATE, PARAMETERS, SECOND_MOMENTS, STEP, set_hyperparameters
from ...graphs.passes.pipelines import OPTIMIZER, apply
from .. import EngineOptions, Tensors
from ..updates import Update
from .dlpack import has_memory, to_ort
from .memory import Piece, pieces
from .sequences import available, make_sequence
from .sessions import make_session

_LARGEST = 2**31 - 1
"""Elements of a tensor on CUDA: InplaceClipGradNorm counts them in 32 bits."""
_KEPT = 4
"""Number of sequences kept: gradients are in the few buffers of a pool."""


def runs_on(device: torch.device) -> bool:
    """Whether the optimizer graph can run on tensors of this device."""
    return device.type == "cpu" or (device.type == "cuda" and available())


class GraphUpdater:
    """Runs `optimizer_model.onnx` on the tensors' own memory, in place."""

    def __init__(self, artifacts: Artifacts, options: EngineOptions) -> None:
        self._lane: Lane | None = None
        if options.device.type == "cuda":
            if not available():
                raise UnsupportedError(
                    "on CUDA the optimizer graph needs sequences of tensors, which only onnxruntime-training 1.19.2 on Linux makes",
                    remedy="Use OrtOptimizer(fused=True).",
                )
            self._lane = Lane(options.device, "Use OrtOptimizer(fused=True), or step outside the capture.")
            self._lane.refuse_capture()
        elif options.device.type != "cpu":
            raise UnsupportedError(f"the optimizer graph does not run on {options.device.type}", remedy="Use OrtOptimizer(fused=True).")
        self._artifacts = artifacts
        self._options = EngineOptions(
            device=options.device,
            threads=options.threads,
            session_options=options.session_options,
            provider_options=options.provider_options,
        )
        self._runs: dict[OptimizerSpec, _Run] = {}
        self._built_in = artifacts.optimizer_spec
        self._default = self._run(self._built_in)

    def apply(self, update: Update) -> bool:
        if self._lane is not None:
            self._lane.refuse_capture()
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
                session = make_session(str(path), self._options, self._lane)
            else:
                source = copy_of(model)
                if not built_in:
                    set_hyperparameters(source, spec)
                apply(source, OPTIMIZER)
                session = make_session(model_bytes(source, path), self._options, self._lane)
            self._runs[spec] = SequenceRun(session, self._lane) if available() else ListRun(session)
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

    def __init__(self, session: Any, make: Callable[[list[Piece]], Any], device: torch.device) -> None:
        names = {value.name for value in session.get_inputs()}
        self.names = [role for role in _ROLES if role in names]
        self._get = [_ROLES[role] for role in self.names]
        self._make, self._device = make, device
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
                    if tensor.device != self._device:
                        raise CheckpointError(
                            f"a parameter, gradient or moment is on {tensor.device}, the optimizer graph on {self._device}",
                            remedy="Move the model before the optimizer is made.",
                        )
                    if self._device.type == "cuda" and tensor.numel() > _LARGEST:
                        raise _refusal("larger")
            if len(self._known) >= _KEPT:
                self._known.clear()
            # Clipping sums the norms of the tensors: joined tensors would be summed in a different order.
            joined = update.hyperparameters.max_norm is None and update.hyperparameters.known and self._device.type == "cpu"
            sizes = [parameter.numel() for parameter in update.parameters]
            found = pieces(addresses, sizes, join=joined)
            if self._device.type == "cuda":  # an empty tensor has no address there, and nothing to update
                found = [[piece for piece in own if piece[1]] for own in found]
            self._known[key] = [self._make(own) for own in found]
        return self._known[key]


class SequenceRun:
    """Sequences on the tensors' memory, bound until a tensor moves."""

    def __init__(self, session: Any, lane: Lane | None = None) -> None:
        from onnxruntime.capi import _pybind_state as ort

        self._session, self._lane = session._sess, lane
        self._runs = Runs(import_onnxruntime()) if lane is not None else None
        self._io = ort.SessionIOBinding(self._session)
        scalars = torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
        self._lr, self._step, self._flag = (scalar.numpy() for scalar in scalars)  # cheaper to set and read than the tensors
        if lane is None:
            self._io.bind_ortvalue_output(session.get_outputs()[0].name, to_ort(scalars[2]))
        else:
            self._io.bind_output(session.get_outputs()[0].name, flag_device())
        names = {value.name for value in session.get_inputs()}
        for name, scalar in zip((LEARNING_RATE, STEP), scalars, strict=False):
            if name in names:
                self._io.bind_ortvalue_input(name, to_ort(scalar))
        device = torch.device("cpu") if lane is None else lane.device
        self._roles = _Roles(session, partial(make_sequence, device=device), device)
        self._bound: _Addresses = []

    def apply(self, update: Update) -> bool:
        self._lr[0], self._step[0] = update.lr, update.step
        addresses = self._roles.addresses(update)
        if self._lane is None or self._runs is None:
            self._bind(addresses, update)
            self._session.run_with_iobinding(self._io, None)
            return bool(self._flag[0])
        with self._lane.ordered():
            self._bind(addresses, update)
            self._session.run_with_iobinding(self._io, self._runs.options())
        # The kernel sets the flag when it is launched, on the host: there is nothing to wait for.
        return bool(ctypes.c_bool.from_address(self._io.get_outputs()[0].data_ptr()).value)

    def __del__(self) -> None:
        lane: Lane | None = getattr(self, "_lane", None)
        if lane is not None:
            with lane.current_device():
                del self._session

    def _bind(self, addresses: _Addresses, update: Update) -> None:
        if addresses != self._bound:
            for role, value in zip(self._roles.names, self._roles.of(addresses, update), strict=True):
                self._io.bind_ortvalue_input(role, value)
            self._bound = addresses


class ListRun:
    """Lists of numpy arrays on the tensors' memory."""

    def __init__(self, session: Any) -> None:
        self._session = session._sess
        names = {value.name for value in session.get_inputs()}
        self._scalars = [name for name in (LEARNING_RATE, STEP) if name in names]
        self._outputs = [session.get_outputs()[0].name]
        self._roles = _Roles(session, lambda own: [_array(piece) for piece in own], torch.device("cpu"))

    def apply(self, update: Update) -> bool:
        scalars = {LEARNING_RATE: np.array([update.lr], np.float32), STEP: np.array([update.step], np.int64)}
        feeds: dict[str, Any] = {name: scalars[name] for name in self._scalars}
        feeds.update(zip(self._roles.names, self._roles.of(self._roles.addresses(update), update), strict=True))
        (updated, *_) = self._session.run(self._outputs, feeds, None)
        return bool(np.asarray(updated).reshape(-1)[0])


_ROLES: dict[str, Callable[[Update], Tensors]] = {
    PARAMETERS: attrgetter("parameters"),
    GRADIENTS: attrgetter("gradients"),
    FIRST_MOMENTS: lambda update: update.first or update.parameters,  # SGD declares them but does not use them
    SECOND_MOMENTS: attrgetter("second"),
}

_address, _is_contiguous = torch.Tensor.data_ptr, torch.Tensor.is_contiguous


def _increment_versions(tensors: Tensors) -> None:
    """Tell autograd that the tensors changed: it does not see writes by ORT."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except TypeError:  # PyTorch 2.4 accepts one tensor at a time
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


def _refusal(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the optimizer graph takes contiguous float32 tensors, not {what} ones", remedy="Use OrtOptimizer(fused=True)."
    )


def _array(piece: Piece) -> Any:
    address, count = piece
    if not count:
        return np.empty(0, np.float32)
    return np.frombuffer(memoryview((ctypes.c_float * count).from_address(address)), np.float32)
