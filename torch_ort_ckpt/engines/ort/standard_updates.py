"""The optimizer's step as a graph of standard operators, for a stock build, in place on memory that PyTorch owns.

The graph has an input and an output for each tensor; both are bound to the tensor's memory (see `graphs.standard.optimizer` for why that
is safe). What depends on rate and step alone is computed here: a dozen scalar nodes would take longer than a small model's update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...checkpoint.state import OptimizerSpec
from ...cuda.provider import Runs
from ...cuda.streams import Lane
from ...graphs.onnxruntime_package import import_onnxruntime
from ...graphs.optimizer import FIRST_MOMENTS, GRADIENTS, PARAMETERS, SECOND_MOMENTS
from ...graphs.standard.optimizer import update_model
from ...graphs.standard.update import NEW, moments_of, scalar_values
from .. import EngineOptions
from ..updates import Update
from .memory import Piece
from .roles import KEPT, Addresses, Roles
from .sessions import make_session, ort_device

_MOMENTS = (FIRST_MOMENTS, SECOND_MOMENTS)


class StandardRun:
    """Sessions of the update for the sizes of tensors that came up, and bindings for the addresses."""

    def __init__(self, spec: OptimizerSpec, options: EngineOptions, lane: Lane | None) -> None:
        self._spec, self._options, self._lane = spec, options, lane
        self._device = options.device if lane is None else lane.device
        kinds = moments_of(spec)
        self._suffixes = {PARAMETERS: "", **{role: f".{kind}" for role, kind in zip(_MOMENTS, kinds, strict=False)}}
        self._roles = Roles([GRADIENTS, *self._suffixes], lambda own: [piece for piece in own if piece[1]], self._device)
        self._sessions: dict[tuple[int, ...], tuple[Any, list[str]]] = {}
        self._runs: dict[int, Runs] = {}
        self._bindings: dict[tuple[tuple[int, ...], ...], tuple[Any, Any, list[str]]] = {}
        self._bound: Addresses = []
        self._current: tuple[Any, Any, list[str]] | None = None
        self._scalars = np.zeros(len(scalar_values(spec, 1.0, 1)), np.float32)

    def apply(self, update: Update) -> bool:
        addresses = self._roles.addresses(update)
        if self._lane is None:
            if (found := self._bound_to(addresses, update)) is not None:
                self._scalars[:] = self._values(update)
                found[0].run_with_iobinding(found[1], None)
            return True
        with self._lane.ordered():
            if (found := self._bound_to(addresses, update)) is not None:
                session, io, names = found
                # Pinned memory is copied without a wait; PyTorch keeps it until the copy is done.
                values = self._values(update)
                scalars = torch.tensor(values, dtype=torch.float32, pin_memory=True).to(self._device, non_blocking=True)
                self._bind_scalars(io, names, scalars.data_ptr())
                session.run_with_iobinding(io, self._runs[id(session)].options())
        return True

    def _values(self, update: Update) -> list[float]:
        return list(scalar_values(self._spec, update.lr, update.step).values())

    def _bound_to(self, addresses: Addresses, update: Update) -> tuple[Any, Any, list[str]] | None:
        """Session, binding and names of its inputs; None if there is nothing in the tensors."""
        if addresses != self._bound:
            self._current = self._binding(addresses, update)
            self._bound = addresses
        return self._current

    def _binding(self, addresses: Addresses, update: Update) -> tuple[Any, Any, list[str]] | None:
        key = tuple(map(tuple, addresses))
        if key not in self._bindings:
            found = dict(zip(self._roles.names, self._roles.of(addresses, update), strict=True))
            if not found[PARAMETERS]:
                return None
            if len(self._bindings) >= KEPT:
                self._bindings.clear()
            self._bindings[key] = self._bind(found)
        return self._bindings[key]

    def _bind(self, found: dict[str, Sequence[Piece]]) -> tuple[Any, Any, list[str]]:
        from onnxruntime.capi import _pybind_state as ort

        session, names = self._session(tuple(size for _, size in found[PARAMETERS]))
        io, device = ort.SessionIOBinding(session._sess), ort_device(self._device)
        if self._lane is None:
            self._bind_scalars(io, names, self._scalars.ctypes.data)
        for role, pieces in found.items():
            for index, (address, size) in enumerate(pieces):
                name = f"g{index}" if role == GRADIENTS else f"p{index}{self._suffixes[role]}"
                io.bind_input(name, device, np.float32, [size], address)
                if role != GRADIENTS or self._spec.max_norm is not None:
                    io.bind_output(f"{name}{NEW}", device, np.float32, [size], address)
        return session._sess, io, names

    def _bind_scalars(self, io: Any, names: list[str], start: int) -> None:
        """Bind the inputs that are scalars; they lie one after the other."""
        device = ort_device(self._device)
        for index, name in enumerate(scalar_values(self._spec, 1.0, 1)):
            if name in names:
                io.bind_input(name, device, np.float32, [], start + 4 * index)

    def _session(self, sizes: tuple[int, ...]) -> tuple[Any, list[str]]:
        if sizes not in self._sessions:
            if len(self._sessions) >= 16:
                self._let_go()
            session = make_session(update_model(self._spec, sizes).SerializeToString(), self._options, self._lane)
            if self._lane is not None:
                self._runs[id(session._sess)] = Runs(import_onnxruntime())
            self._sessions[sizes] = session, [value.name for value in session.get_inputs()]
        return self._sessions[sizes]

    def _let_go(self) -> None:
        """Drop every session: on CUDA that frees memory, which sets the current device."""
        with self._lane.current_device() if self._lane is not None else contextlib.nullcontext():
            self._current = None
            self._bound = []
            self._bindings.clear()
            self._sessions.clear()
            self._runs.clear()

    def __del__(self) -> None:
        if getattr(self, "_lane", None) is not None:
            self._let_go()
