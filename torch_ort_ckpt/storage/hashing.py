"""xxh3-128, the hash for checksums and identities. It detects corruption at memory speed; it is not cryptographic."""

from __future__ import annotations

import os

import torch
import xxhash

from ..errors import CheckpointError
from .buffers import open_file
from .paths import PathLike
from .tensors import byte_view

_CHUNK = 1 << 20


class Hasher:
    """A running hash of bytes and tensors."""

    def __init__(self, data: bytes | bytearray | memoryview = b"") -> None:
        self._hash = xxhash.xxh3_128(data)

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._hash.update(data)

    def update_tensor(self, tensor: torch.Tensor) -> None:
        """The elements in row-major order, as they are written to files."""
        self._hash.update(byte_view(tensor.cpu()).numpy().data)

    def hex(self) -> str:
        """32 hexadecimal digits."""
        return self._hash.hexdigest()


def bytes_hash(data: bytes | bytearray | memoryview) -> str:
    """The hash of these bytes: 32 hexadecimal digits."""
    return Hasher(data).hex()


def file_hash(path: PathLike) -> str:
    """The hash of a file's bytes: 32 hexadecimal digits. Uses the memory of one chunk, however large the file."""
    hasher, chunk = Hasher(), memoryview(bytearray(_CHUNK))
    with open_file(os.fspath(path)) as file:
        try:
            while count := file.readinto(chunk):  # type: ignore[attr-defined]
                hasher.update(chunk[:count])
        except OSError as error:
            raise CheckpointError(f"can't be read ({error.strerror})", path=path, remedy="Check the medium, and read it again.") from error
    return hasher.hex()
