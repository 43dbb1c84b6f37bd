"""`onnx`: the initializers of a model. Read: a state from them. Written: a model with the state's weights put into them.

The model's file is read in place like any other format (initializers alias the mapping, external data included); writing parses the model
with `onnx`, so that everything else in it stays as it is.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ...checkpoint.backing import backed_by
from ...checkpoint.names import joined_aliases, split_aliases
from ...checkpoint.state import CheckpointState, Value, is_string, nbytes
from ...dtypes import ONNX_FROM_TORCH, STRING
from ...errors import CheckpointError, CorruptFileError, MissingFileError, UnsupportedError
from ...storage.buffers import FileBuffer
from ...storage.files import Progress, padding, pending_file, tensor_bytes, warn, write_tensor
from ...storage.filesets import IDENTITY_LENGTH
from ...storage.hashing import Hasher, file_hash
from ...storage.locks import directory_lock
from ...storage.paths import PathLike
from ..notes import lost_with_weights_alone
from ..shapes import growth_limit
from ..soundness import encode_string
from .protobuf import Message, external_number, tensor

SUFFIXES = (".onnx",)
READ_BY = "every release of ORT as a model, none as a checkpoint"
_GRAPH, _INITIALIZER, _BYTES = 7, 5, 2  # ModelProto.graph, GraphProto.initializer, the wire type of messages
_EXTERNAL_ABOVE = 1800 << 20  # protobuf stops at 2 GiB
_EXTERNAL_FROM = 1024


def matches(path: Path) -> bool:
    """Protobuf has no magic number: the suffix decides."""
    return path.is_file() and path.suffix.lower() == ".onnx"


def read(path: Path, *, mmap: bool = True) -> CheckpointState:
    """The initializers as parameters. A model does not say what is trained: floating-point tensors count as trainable."""
    buffer = FileBuffer(path, mmap=mmap)
    outside = _Outside(path, mmap)
    state = CheckpointState()
    model = Message(buffer, 0, buffer.size, "model")
    graphs = [Message(buffer, start, end, "graph") for number, wire, start, end in model.fields() if number == _GRAPH and wire == _BYTES]
    if not graphs:
        raise CorruptFileError("no graph inside", path=path, remedy="Is this an ONNX model?")
    for graph in graphs:
        index = 0
        for number, wire, start, end in graph.fields():
            if number != _INITIALIZER or wire != _BYTES:
                continue
            name, value = tensor(Message(buffer, start, end, f"initializer {index}"), outside.find)
            index += 1
            if name in state.trainable or name in state.frozen:
                raise CorruptFileError("an initializer occurs twice", path=path, field=name)
            (state.trainable if not is_string(value) and value.is_floating_point() else state.frozen)[name] = value
    backed_by(state, [buffer, *outside.buffers.values()])
    return split_aliases(state)


class _Outside:
    """External data files next to the model, opened when first needed."""

    def __init__(self, path: Path, mmap: bool) -> None:
        self.path, self.mmap = path, mmap
        self.buffers: dict[str, FileBuffer] = {}
        self._claimed = 0

    def find(self, entries: dict[str, str], size: int, name: str) -> tuple[FileBuffer, int]:
        buffer = self._open(entries.get("location", ""), name)
        offset, length = (
            external_number(entries.get(key), key, default, self.path, name) for key, default in (("offset", 0), ("length", size))
        )
        if length != size:
            raise CorruptFileError(f"says it has {length} bytes, its shape and type need {size}", path=self.path, field=name)
        if offset + size > buffer.size:
            raise CorruptFileError(f"needs bytes {offset} to {offset + size}, the file ends at {buffer.size}", path=buffer.path, field=name)
        self._claimed += size  # tied weights may share their data; misaligned data is copied
        if self._claimed > growth_limit(sum(opened.size for opened in self.buffers.values())):
            raise CorruptFileError("the same data is used too often", path=buffer.path, field=name)
        return buffer, offset

    def _open(self, location: str, name: str) -> FileBuffer:
        folder = os.path.realpath(self.path.parent)
        try:
            place = os.path.realpath(os.path.join(folder, location))
            inside = bool(location) and not os.path.isabs(location) and os.path.commonpath([folder, place]) == folder
        except (ValueError, OSError):  # a zero or a lone surrogate in it, a loop of links
            inside = False
        if not inside:
            raise CheckpointError(
                f"external data outside the model's folder ({location!r})",
                path=self.path,
                field=name,
                remedy="Put the data beside the model.",
            )
        if place not in self.buffers:
            if not os.path.exists(place):
                raise MissingFileError(
                    "external data of the model is missing", path=place, field=name, remedy="Put the data file beside the model."
                )
            self.buffers[place] = FileBuffer(place, mmap=self.mmap)
        return self.buffers[place]


def write(
    state: CheckpointState,
    path: Path,
    *,
    durable: bool = True,
    progress: Progress | None = None,
    model: PathLike | None = None,
    external_data: bool | None = None,
) -> None:
    """Put the weights into a copy of `model` (default: the model already at `path`), whose initializers name what goes where.

    Every initializer that the state has is replaced; shapes and types must agree. The rest of the model stays. Above 1800 MiB (or with
    `external_data`) the data goes into a file of its own, named by its content, so that model and data can't be mixed up.
    """
    if state.nominal or any(not is_string(value) and value.is_meta for value in state.parameters.values()):
        raise UnsupportedError("a nominal state has no data to put into a model", path=path, remedy="Complete it first.")
    if lost := lost_with_weights_alone(state):
        warn(f"{path}: a model holds weights only; left out: {', '.join(lost)}")
    proto = _parse(model if model is not None else path)
    values = {**state.parameters, **joined_aliases(state)}
    wanted = {item.name: item for item in proto.graph.initializer}
    if unused := sorted(values.keys() - wanted.keys()):
        warn(f"{path}: the model has no initializer for {', '.join(unused[:5])}{' ...' if len(unused) > 5 else ''}")
    chosen = {name: values[name] for name in wanted if name in values}
    if not chosen:
        raise UnsupportedError(
            "none of the state's weights is an initializer of the model",
            path=path,
            remedy="Use the model that these weights belong to, or a --name-map.",
        )
    for name, value in chosen.items():
        _check(wanted[name], value, path)
    total = sum(nbytes(value) for value in chosen.values())
    external = total > _EXTERNAL_ABOVE if external_data is None else external_data
    outside = []
    for name, value in chosen.items():
        if external and not is_string(value) and nbytes(value) >= _EXTERNAL_FROM:
            outside.append((wanted[name], value))
            continue
        _fill(wanted[name], value, path)
        if progress and not external:
            progress(nbytes(value))
    write_model(proto, outside, path, durable=durable, progress=progress)


def write_model(
    proto: Any, outside: Sequence[tuple[Any, torch.Tensor]], path: PathLike, *, durable: bool = True, progress: Progress | None = None
) -> None:
    """Write a model and, where there are initializers `outside` of it, their data beside it.

    The data file is named by its content, `<model>.<hash>.data`, and comes first: the old model keeps its own data until the new one is
    in place.
    """
    target = Path(os.path.realpath(path))
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(pending_file(f"{target}.data")) if outside else None
        place = None
        if data is not None:
            place = target.with_name(f"{target.name}.{_write_data(data.file, outside, progress)}.data")
            for item, _ in outside:
                item.external_data.add(key="location", value=place.name)
        main = stack.enter_context(pending_file(path))
        main.file.write(proto.SerializeToString())
        for pending in (data, main):
            if pending is not None:
                pending.finish(durable)
        with directory_lock(target.parent):
            known, older = place is not None and os.path.lexists(place), _older_data(target, place)
            try:
                if data is not None:
                    data.commit(durable, place)
                main.commit(durable)
            except OSError:
                if place is not None and not known and not main.committed:
                    with contextlib.suppress(OSError):
                        os.unlink(place)
                raise
            for file in older:
                with contextlib.suppress(OSError):
                    os.unlink(file)


def _write_data(file: BinaryIO, outside: Sequence[tuple[Any, torch.Tensor]], progress: Progress | None) -> str:
    """Write the tensors, set their location in the initializers, and return the hash of everything."""
    hasher, end = Hasher(), 0
    for item, value in outside:
        gap = bytes(padding(end))
        hasher.update(gap)
        end += file.write(gap)
        _clear(item)
        item.data_location = 1
        for key, text in (("offset", str(end)), ("length", str(nbytes(value)))):
            item.external_data.add(key=key, value=text)
        end += write_tensor(file, value, progress)
        hasher.update_tensor(value)
    return hasher.hex()


def _older_data(target: Path, place: Path | None) -> list[Path]:
    """The data files of earlier saves of this model: those that the model now there names, and those whose content has their name."""
    pattern = re.compile(re.escape(target.name) + rf"\.([0-9a-f]{{{IDENTITY_LENGTH}}})\.data")
    try:
        found = {file: name for file in target.parent.iterdir() if file != place and (name := pattern.fullmatch(file.name))}
        model = FileBuffer(target, kept=False).data if found and os.path.isfile(target) else b""
        return [file for file, name in found.items() if model.find(os.fsencode(file.name)) >= 0 or file_hash(file) == name[1]]
    except (OSError, CheckpointError):  # nothing is removed then
        return []


def _parse(path: PathLike) -> Any:
    import onnx
    from google.protobuf.message import DecodeError

    if not os.path.exists(path):
        raise MissingFileError(
            "no model to put the weights into", path=path, remedy="Pass model= (--model), an ONNX file with these initializers."
        )
    try:
        return onnx.load(os.fspath(path))
    except (DecodeError, OSError, ValueError, onnx.checker.ValidationError) as error:
        raise CorruptFileError(f"not a readable ONNX model ({type(error).__name__}: {error})", path=path) from error


def _check(item: Any, value: Value, path: PathLike) -> None:
    number = STRING if is_string(value) else ONNX_FROM_TORCH.get(value.dtype)
    if tuple(item.dims) != tuple(value.shape) or item.data_type != number:
        mine, own = f"{tuple(value.shape)} of type {number}", f"{tuple(item.dims)} of type {item.data_type}"
        raise UnsupportedError(
            f"{mine}, the model's initializer is {own}",
            path=path,
            field=item.name,
            remedy="Use the model that these weights belong to, or convert with --dtype.",
        )


def _clear(item: Any) -> None:
    for name in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data", "external_data"):
        item.ClearField(name)
    item.data_location = 0


def _fill(item: Any, value: Value, path: PathLike) -> None:
    _clear(item)
    if is_string(value):
        item.string_data.extend(encode_string(text, path, item.name) for text in value.reshape(-1).tolist())
    else:
        item.raw_data = bytes(tensor_bytes(value)) if value.numel() else b""
