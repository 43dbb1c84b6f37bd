"""`dcp`: a folder of `torch.distributed.checkpoint`, written by all ranks of a process group together, each its share.

Keys are `model.<weight>` and `optimizer.<group>.<weight>.<moment>`; what tensors can't say is a JSON text under `torch_ort_ckpt`, itself a
tensor of bytes. DCP's index, `.metadata`, is a pickle: it is read with an unpickler that knows DCP's own few classes and nothing else.
Folders that others wrote are read too: their `model.` (or `state_dict.`) tensors, and `optim.state.<weight>.<moment>` as moments.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import folders
from ..bridge import TO_ORT_MOMENTS
from ..errors import CheckpointError, CorruptFileError, MissingFileError, UnsupportedError
from ..folders import atomic_folder
from ..names import split_aliases
from ..state import CheckpointState, OptimizerGroup, Value, nbytes
from ..storage import Progress, save_error, warn
from .extras import dump_json
from .notes import describe, rebuild

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
            state.optimizer[group].states[param][moment] = tensors[key]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"malformed ({type(error).__name__}: {error})", path=path, field=KEY) from error
    return state


def write(state: CheckpointState, path: Path, *, durable: bool = True, progress: Progress | None = None) -> None:
    """Write the folder. In a process group every rank must call this with the same state: each writes its share of it."""
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
    except CheckpointException as error:
        cause = next((failure[0] for failure in error.failures.values() if isinstance(failure[0], OSError)), None)
        if cause is not None:
            raise save_error(cause, path) from error
        raise CheckpointError(f"can't be written ({error}); what was there before is untouched", path=path) from error
    if not alone:
        dist.barrier()  # nobody goes on before the first rank has put the folder in place
    if progress:
        progress(sum(nbytes(value) for value in content.values()))


def _begin(stack: contextlib.ExitStack, path: Path, durable: bool) -> Path:
    """The folder to write into, which takes the place of `path` when the stack closes."""
    try:
        return stack.enter_context(atomic_folder(path, owns, durable=durable)).temporary
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
    """Finish a save that was cut short between its two renames."""
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
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return metadata

    metadata = read_index(path / INDEX)
    available = sum(place.stat().st_size for place in path.iterdir() if place.is_file())
    tensors: dict[str, torch.Tensor] = {}
    try:
        skipped = [name for name, entry in metadata.state_dict_metadata.items() if not isinstance(entry, TensorStorageMetadata)]
        for name, entry in metadata.state_dict_metadata.items():
            if name in skipped:
                continue
            available -= entry.size.numel() * entry.properties.dtype.itemsize
            if available < 0:
                raise CorruptFileError("says it is larger than the files are", path=path, field=name)
            tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        for entry in metadata.storage_data.values():
            if Path(entry.relative_path).name != entry.relative_path:
                raise CorruptFileError("refers to a file outside the folder", path=path, field=entry.relative_path)
        if tensors:
            load(dict(tensors), storage_reader=Reader(path), no_dist=True)
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise MissingFileError("a file of the set is missing", path=error.filename or path) from error
    except (CheckpointException, ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError, EOFError) as error:
        raise CorruptFileError(f"torch.distributed.checkpoint can't read it ({str(error).splitlines()[0][:200]})", path=path) from error
    if skipped:
        warn(f"{path}: {len(skipped)} entries that are not tensors are left out: {', '.join(sorted(skipped)[:5])}")
    return tensors


def read_index(path: Path) -> Any:
    """DCP's `.metadata`, unpickled with DCP's own classes only."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise MissingFileError("no such file", path=path) from error
    except OSError as error:
        raise CheckpointError(f"can't be read ({error.strerror})", path=path) from error
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except CheckpointError as error:
        error.path = str(path)
        raise
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        ImportError,
        MemoryError,
    ) as error:
        raise CorruptFileError(f"not DCP's index ({type(error).__name__}: {error})", path=path) from error


class _Unpickler(pickle.Unpickler):
    ALLOWED = {  # noqa: RUF012  # never changed
        "torch.distributed.checkpoint.metadata": {
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
            "StorageMeta", "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size", "device"} | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)},
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath"},
        "pathlib._local": {"PosixPath", "WindowsPath"},
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.ALLOWED.get(module, ()):
            raise UnsupportedError(
                f"its index asks for {module}.{name}, which is not DCP's", remedy="This library runs no code from files."
            )
        if module.startswith("pathlib"):
            return lambda *parts: "/".join(parts)  # only where the folder once was
        return super().find_class(module, name)


def _foreign(tensors: Mapping[str, torch.Tensor], path: Path) -> CheckpointState:
    state = CheckpointState()
    group = OptimizerGroup()
    prefix = next((prefix for prefix in _MODELS if any(name.startswith(prefix) for name in tensors)), "")
    for name, value in tensors.items():
        marker = next((marker for marker in _OPTIMIZERS if name.startswith(marker)), None)
        if marker is not None:
            param, _, moment = name.removeprefix(marker).rpartition(".")
            if moment == "step":
                group.step = max(group.step, int(value))
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
