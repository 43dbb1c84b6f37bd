"""What must hold for every state that comes from a file, whatever its format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..checkpoint.backing import bytes_on_disk
from ..checkpoint.state import CheckpointState, PartitionInfo, Value, is_string, nbytes
from ..errors import CorruptFileError, UnsupportedError
from ..storage.paths import PathLike
from .shapes import MAX_GROWTH, element_count, growth_limit


def check_loaded(state: CheckpointState, path: PathLike) -> None:
    """Raise for what no checkpoint writer produces: names that are not text, steps that are not numbers, tensors out of proportion."""
    for field, name in names_in(state):
        if not isinstance(name, str):
            raise CorruptFileError(f"a name that is not text ({type(name).__name__})", path=path, field=field)
    for field, problem in group_problems(state):
        raise CorruptFileError(problem, path=path, field=field)
    _check_growth(state, path)


def names_in(state: CheckpointState) -> Iterator[tuple[str, Any]]:
    """Every name in a state, loaded or to be saved, and where it stands."""
    for kind in ("trainable", "frozen", "mixed_precision", "partitions", "optimizer", "properties"):
        for name in getattr(state, kind):
            yield kind, name
    for group_name, group in state.optimizer.items():
        yield from ((f"optimizer/{group_name}/hyperparameters", name) for name in group.hyperparameters)
        for param, moments in group.states.items():
            yield f"optimizer/{group_name}", param
            for moment in moments:
                yield f"optimizer/{group_name}/{param}", moment


def group_problems(state: CheckpointState) -> Iterator[tuple[str, str]]:
    """What is wrong with the optimizer groups of a state, loaded or to be saved: (field, problem)."""
    for group_name, group in state.optimizer.items():
        for param, moments in group.states.items():
            if "step" in moments and not _is_whole_number(moments["step"]):
                yield f"optimizer/{group_name}/{param}/step", "a step that is not one whole number"
        if not is_shallow(group.hyperparameters):
            yield f"optimizer/{group_name}/hyperparameters", "nested too deeply"


def check_partition(info: PartitionInfo) -> None:
    """Whether it is a shape and the number of an axis."""
    element_count(info.original_dim)
    if type(info.megatron_row_partition) is not int:
        raise TypeError(f"an axis that is not a number: {info.megatron_row_partition!r}")


def is_shallow(content: Any, levels: int = 64) -> bool:
    """What a parser accepts can be nested too deeply to compare or to write again."""
    items = content.values() if isinstance(content, dict) else content if isinstance(content, (list, tuple)) else ()
    return levels > 0 and all(is_shallow(item, levels - 1) for item in items)


def encode_string(text: Any, path: PathLike, field: str) -> bytes:
    """The bytes of a string from a file or of a user, as files hold them: UTF-8, and bytes that were not UTF-8 as they were."""
    try:
        return str(text).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise UnsupportedError(
            "text with a lone surrogate, which is not Unicode", path=path, field=field, remedy="Replace that character."
        ) from error


def is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogates in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_growth(state: CheckpointState, path: PathLike) -> None:
    """Each tensor counted by itself: tied weights and expanded tensors share their bytes only in memory."""
    files = bytes_on_disk(state)
    if files is None:
        return
    limit, total = growth_limit(files), 0
    for name, value in state.tensors():
        total += nbytes(value)
        if total > limit:
            raise CorruptFileError(
                f"tensors of more than {limit} bytes from {files} bytes on disk",
                path=path,
                field=name,
                remedy=f"The same bytes may be used {MAX_GROWTH} times; a file that asks for more is damaged or was made to do harm.",
            )


def _is_whole_number(value: Value) -> bool:
    if is_string(value) or value.numel() != 1 or value.is_complex():
        return False
    return value.is_meta or float(value).is_integer()
