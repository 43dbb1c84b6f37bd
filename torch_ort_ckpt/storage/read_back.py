"""Reading back what was just written, while it is still in the processor's cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, BinaryIO

import torch

from .tensors import memory_key, same_bytes

PIECE = 1 << 20
"""Tensors are read back in pieces of this size."""


class ReadBack:
    """Compares pieces of a file with what was written there. `damaged` is true if any byte differed."""

    def __init__(self) -> None:
        self._buffer = torch.empty(PIECE, dtype=torch.uint8)
        self._space = self._buffer.numpy().data
        self._compared: set[Any] = set()
        self.damaged = False

    def check(self, file: BinaryIO, written: memoryview) -> None:
        """The piece that ends at the file's position."""
        size = len(written)
        found = os.preadv(file.fileno(), [self._space[:size]], file.tell() - size)
        if found != size or not same_bytes(torch.frombuffer(written, dtype=torch.uint8), self._buffer[:size]):
            self.damaged = True

    def add(self, value: torch.Tensor) -> None:
        """Every piece of this tensor was checked."""
        self._compared.add(memory_key(value))

    def __contains__(self, value: torch.Tensor) -> bool:
        return memory_key(value) in self._compared


_active: ContextVar[ReadBack | None] = ContextVar("read_back", default=None)


@contextlib.contextmanager
def reading_back() -> Iterator[ReadBack | None]:
    """In this block, `write_tensor` reads back what it writes to a file. None where the system can't (Windows)."""
    reader = ReadBack() if hasattr(os, "preadv") else None
    token = _active.set(reader)
    try:
        yield reader
    finally:
        _active.reset(token)


def active_reader() -> ReadBack | None:
    return _active.get()
