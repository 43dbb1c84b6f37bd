"""Many checkpoints read piece by piece, with no file kept open: thousands of them need neither descriptors nor memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..checkpoint.backing import buffers_behind
from ..checkpoint.state import CheckpointState, OptimizerGroup, Value, nbytes
from ..storage.buffers import FileBuffer, read_range

_SMALL = 4096
"""Bytes. What is smaller (steps, biases) stays in memory."""


@dataclass(frozen=True)
class _Located:
    """Where in a file a tensor's bytes are."""

    path: str
    origin: os.stat_result
    offset: int
    dtype: torch.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        size = self.dtype.itemsize
        data = read_range(self.path, self.offset + start * size, (stop - start) * size, self.origin)
        return torch.frombuffer(data, dtype=self.dtype)


class Pieces:
    """Reads slices of tensors, wherever they are."""

    def __init__(self) -> None:
        self._located: dict[int, tuple[torch.Tensor, _Located]] = {}  # by id of a tensor on the meta device, which it keeps alive

    def without_files(self, state: CheckpointState) -> CheckpointState:
        """The same state with its large tensors on the meta device; `read` gets their values from the files."""
        buffers = [(torch.frombuffer(buffer.data, dtype=torch.uint8).data_ptr(), buffer) for buffer in buffers_behind(state) if buffer.size]

        def lean(values: Mapping[str, Value]) -> dict[str, Value]:
            return {name: self._lean(value, buffers) for name, value in values.items()}

        groups: dict[str, OptimizerGroup] = {}
        for name, group in state.optimizer.items():
            groups[name] = replace(group, states={param: lean(states) for param, states in group.states.items()})
        return CheckpointState(
            trainable=lean(state.trainable),
            frozen=lean(state.frozen),
            optimizer=groups,
            properties=dict(state.properties),
            mixed_precision=lean(state.mixed_precision),
            partitions=dict(state.partitions),
            nominal=state.nominal,
            format_version=state.format_version,
        )

    def read(self, value: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Elements of the flattened tensor, on the CPU."""
        found = self._located.get(id(value))
        return value.reshape(-1)[start:stop].cpu() if found is None else found[1].read(start, stop)

    def _lean(self, value: Any, buffers: list[tuple[int, FileBuffer]]) -> Any:
        if not isinstance(value, torch.Tensor) or value.is_meta or not value.is_contiguous():
            return value
        if nbytes(value) < _SMALL:
            return value.clone()
        for base, buffer in buffers:
            offset = value.data_ptr() - base
            if offset >= 0 and offset + nbytes(value) <= buffer.size:
                stand_in = torch.empty(value.shape, dtype=value.dtype, device="meta")
                self._located[id(stand_in)] = stand_in, _Located(buffer.path, buffer.origin, offset, value.dtype)
                return stand_in
        return value
