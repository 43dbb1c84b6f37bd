"""`dcp`: a folder of `torch.distributed.checkpoint`, written by all ranks of a process group together, each writing its share.

Keys are `model.<weight>` and `optimizer.<group>.<weight>.<moment>`; everything else is a JSON text under `torch_ort_ckpt`, itself a
tensor of bytes. Nothing of a folder is unpickled: its index and the archives in its files are read as data (`dcp_index`, `torch_archive`).
Folders that others wrote are read too: their `model.` (or `state_dict.`) tensors, and `optim.state.<weight>.<moment>` as moments. What is
not a tensor (numbers, text, other objects) is never opened; a warning names it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...checkpoint.bridge import TO_ORT_MOMENTS
from ...checkpoint.names import split_aliases
from ...checkpoint.state import CheckpointState, OptimizerGroup, Value, nbytes
from ...errors import CheckpointError, CorruptFileError, UnsupportedError
from ...storage import folders
from ...storage.buffers import FileBuffer
from ...storage.files import Progress, save_error, warn
from ...storage.folders import atomic_folder
from ...storage.system import sync
from ..notes import describe, rebuild
from ..ort.extras import dump_json
from ..shapes import element_count
from ..torch.archive import load_tensor
from .index import Chunk, Entry, Place, read_index

SUFFIXES = (".dcp", ".distcp")
INDEX = ".metadata"
KEY = "torch_ort_ckpt"
_MODELS = ("model.", "state_dict.", "module.")
_OPTIMIZERS = ("optim.state.", "optimizer.state.", "optimizers.state.")


def matches(path: Path) -> bool:
    return path.is_dir() and (path / INDEX).is_file()


def read(path: Path, *, mmap: bool = True) -> CheckpointState:
    """Read the whole state into memory (DCP's files can't be mapped, so `mmap` has no effect)."""
    tensors = _load(path)
    text = tensors.pop(KEY, None)
    if text is None:
        return _foreign(tensors, path)
    try:
        note = json.loads(bytes(text.numpy()))
        moments = note.pop("moments")
        named = {name.removeprefix("model."): value for name, value in tensors.items() if name not in moments}
        state = rebuild(named, note, path)
        for key, (group, param, moment) in moments.items():
            if not isinstance(moment, str):
                raise TypeError("a moment whose name is not text")
            state.optimizer[group].states[param][moment] = tensors[key]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError, OverflowError) as error:
        raise CorruptFileError(f"malformed ({type(error).__name__}: {error})", path=path, field=KEY) from error
    return state


def write(state: CheckpointState, path: Path, *, durable: bool = True, progress: Progress | None = None) -> None:
    """Write the folder. In a process group every rank must call this with the same state, and writes its share."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    content = _flatten(state, path)
    first, alone = not dist.is_initialized() or dist.get_rank() == 0, not dist.is_initialized()
    try:
        with contextlib.ExitStack() as stack:
            folder = _begin(stack, path, durable) if first else None
            folder = folder if alone else _agreed(folder, path)
            save(content, storage_writer=FileSystemWriter(folder or path, sync_files=durable), no_dist=alone)
            if first and durable:
                _sync_index(folder or path)
    except CheckpointException as error:
        cause = next((failure[0] for failure in error.failures.values() if isinstance(failure[0], OSError)), None)
        if cause is not None:
            raise save_error(cause, path) from error
        raise CheckpointError(f"can't be written ({error}); what was there before is untouched", path=path) from error
    if not alone:
        dist.barrier()  # all ranks wait until the first one has renamed the folder into place
    if progress:
        progress(sum(nbytes(value) for value in content.values()))


def _sync_index(folder: Path) -> None:
    """PyTorch 2.13 syncs its index while the bytes are still in Python's buffer: the file would be empty after a power failure."""
    with open(folder / INDEX, "rb+") as file:
        sync(file.fileno())


def _begin(stack: contextlib.ExitStack, path: Path, durable: bool) -> Path:
    """The folder to write to, which replaces `path` when the stack closes."""
    try:
        return stack.enter_context(atomic_folder(path, owns, durable=durable)).path
    except CheckpointError:
        if dist.is_initialized():
            dist.broadcast_object_list([None], src=0)
        raise


def _agreed(folder: Path | None, path: Path) -> Path:
    """The first rank's folder, on all of them."""
    box = [folder]
    dist.broadcast_object_list(box, src=0)
    if box[0] is None:
        raise CheckpointError("the first rank can't write there", path=path)
    return box[0]


def owns(name: str) -> bool:
    return name == INDEX or name.endswith(".distcp")


def repair(path: Path) -> bool:
    """Finish a save that was interrupted between its two renames."""
    return folders.repair(path)


def _flatten(state: CheckpointState, path: Path) -> dict[str, torch.Tensor]:
    if state.nominal:
        raise UnsupportedError("a nominal state has no data to write", path=path, remedy="Complete it first, or keep it in format 'ort'.")
    tensors, note = describe(state, path)
    content: dict[str, Any] = {f"model.{name}": value.detach() for name, value in tensors.items()}
    note["moments"] = {}
    for group_name, group in state.optimizer.items():
        for param, moments in group.states.items():
            for moment, value in moments.items():
                key = f"optimizer.{group_name}.{param}.{moment}"
                if key in content:
                    raise UnsupportedError("two tensors would share this key", path=path, field=key, remedy="Rename the group.")
                content[key] = value.detach()
                note["moments"][key] = [group_name, param, moment]
    content[KEY] = torch.frombuffer(bytearray(dump_json(note, path, KEY).encode()), dtype=torch.uint8)
    return content


# Reading


def _load(path: Path) -> dict[str, torch.Tensor]:
    index = read_index(path / INDEX)
    places = sorted({chunk.place for entry in index.tensors.values() for chunk in entry.chunks if chunk.place}, key=_order)
    with contextlib.closing(_Files(path)) as files:
        for before, after in itertools.pairwise(places):
            if before.file == after.file and after.start < before.end:
                raise CorruptFileError("chunks that overlap in the file", path=path / after.file)
        for place in places:
            files.check(place)
        available = files.size()
        tensors: dict[str, torch.Tensor] = {}
        for name, entry in index.tensors.items():
            available -= entry.nbytes
            if available < 0:
                raise CorruptFileError("its size is larger than the files", path=path, field=name)
            try:
                tensors[name] = _assembled(entry, name, files)
            except (RuntimeError, OverflowError, TypeError, MemoryError) as error:  # a shape with a zero and sizes that torch can't have
                what = (str(error).splitlines() or [""])[0][:200]
                raise CorruptFileError(f"impossible shape {entry.shape[:8]} ({what})", path=path, field=name) from error
    if index.others:
        warn(f"{path}: {len(index.others)} entries that are not tensors are left out: {', '.join(sorted(index.others)[:5])}")
    return tensors


def _assembled(entry: Entry, name: str, files: _Files) -> torch.Tensor:
    """One tensor of its chunks, which must cover every element once."""
    chunks = [chunk for chunk in entry.chunks if chunk.place is not None]
    for chunk in chunks:
        if len(chunk.offsets) != len(entry.shape) or len(chunk.sizes) != len(entry.shape):
            raise files.error("a chunk with another number of dimensions", name)
        if any(offset + size > total for offset, size, total in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)):
            raise files.error("a chunk that reaches outside the tensor", name)
    if sum(element_count(chunk.sizes) for chunk in chunks) != element_count(entry.shape) or _overlap(chunks):
        raise files.error("its chunks do not cover the tensor: some are missing, or overlap", name)
    whole = None if len(chunks) == 1 else torch.empty(entry.shape, dtype=entry.dtype)
    for chunk in chunks:
        value = files.tensor(chunk, name)
        if value.dtype != entry.dtype or tuple(value.shape) != chunk.sizes or value.is_meta:
            raise files.error("a chunk that is not what the index says", name)
        if whole is None:
            return value.contiguous()
        whole[tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))] = value
    assert whole is not None
    return whole


def _overlap(chunks: list[Chunk]) -> bool:
    """Whether any two boxes share an element. Uses a grid with a cell between any two borders: never more cells than elements."""
    if len(chunks) < 2:
        return False
    borders = []
    for axis in range(len(chunks[0].sizes)):
        found = {edge for chunk in chunks for edge in (chunk.offsets[axis], chunk.offsets[axis] + chunk.sizes[axis])}
        borders.append({edge: number for number, edge in enumerate(sorted(found))})
    taken = torch.zeros([len(edges) - 1 for edges in borders], dtype=torch.bool)
    for chunk in chunks:
        box = tuple(slice(edges[at], edges[at + size]) for edges, at, size in zip(borders, chunk.offsets, chunk.sizes, strict=True))
        if bool(taken[box].any()):
            return True
        taken[box] = True
    return False


class _Files:
    """The files of a folder, opened when first needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, FileBuffer] = {}

    def error(self, message: str, name: str) -> CorruptFileError:
        return CorruptFileError(message, path=self.path, field=name)

    def file(self, name: str) -> FileBuffer:
        if name not in self._open:
            self._open[name] = FileBuffer(self.path / name, kept=False)
        return self._open[name]

    def size(self) -> int:
        return sum(buffer.size for buffer in self._open.values())

    def close(self) -> None:
        for buffer in self._open.values():
            buffer.close()

    def check(self, place: Place) -> None:
        if place.end > self.file(place.file).size:
            raise CorruptFileError(
                f"the index needs bytes {place.start} to {place.end}, the file ends at {self.file(place.file).size}",
                path=self.path / place.file,
            )

    def tensor(self, chunk: Chunk, name: str) -> torch.Tensor:
        """A chunk's tensor, in memory of its own: archives may start at any offset in these files, so their data can't be mapped."""
        assert chunk.place is not None
        buffer = self.file(chunk.place.file)
        return load_tensor(buffer, chunk.place.start, chunk.place.end, name).resolve_conj().resolve_neg()


def _order(place: Place) -> tuple[str, int, int]:
    return place.file, place.start, place.end


def _foreign(tensors: Mapping[str, torch.Tensor], path: Path) -> CheckpointState:
    state = CheckpointState()
    group = OptimizerGroup()
    prefix = next((prefix for prefix in _MODELS if any(name.startswith(prefix) for name in tensors)), "")
    for name, value in tensors.items():
        marker = next((marker for marker in _OPTIMIZERS if name.startswith(marker)), None)
        if marker is not None:
            param, _, moment = name.removeprefix(marker).rpartition(".")
            if moment == "step":
                group.step = max(group.step, _whole_number(value, path, name))
            else:
                group.states.setdefault(param, {})[TO_ORT_MOMENTS.get(moment, moment)] = value
        elif name.startswith(prefix):
            home: dict[str, Value] = state.trainable if value.is_floating_point() else state.frozen
            home[name.removeprefix(prefix)] = value
        else:
            warn(f"{path}: {name} is neither a weight nor a moment and is left out")
    if group.states:
        state.optimizer["group0"] = group
    return split_aliases(state)


def _whole_number(value: torch.Tensor, path: Path, name: str) -> int:
    if value.numel() != 1 or value.is_complex() or not float(value).is_integer():
        raise CorruptFileError("a step that is not one whole number", path=path, field=name)
    return int(value)
