"""The errors a user can cause, one by one: each says what is wrong, where, and what to do."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from torch_ort_ckpt.errors import CorruptFileError, MissingFileError, UnsupportedError

from .truth import Truth

PACKAGE = Path(toc.__file__).parent
ADAMW = Truth("fbv2_ort1_19_2_adamw_full")
NET = nn.Sequential(nn.Linear(3, 2))


def small(**more: torch.Tensor) -> toc.CheckpointState:
    return toc.CheckpointState(trainable={"w": torch.ones(2, 3), **more})


def groups(count: int) -> toc.CheckpointState:
    state = small(v=torch.ones(2))
    for number, name in enumerate(("w", "v")[:count]):
        state.optimizer[f"g{number}"] = toc.OptimizerGroup(1, states={name: {"momentum0": torch.ones_like(state.trainable[name])}})
    return state


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def cut(folder: Path) -> Path:
    return written(folder / "cut", ADAMW.checkpoint.read_bytes()[:-100])


def half(folder: Path) -> object:
    toc.save(small(), folder / "a", external_data=True)
    (folder / "a.data").unlink()
    return toc.load(folder / "a")


def saved(state: toc.CheckpointState, path: Path, **options: object) -> Path:
    toc.save(state, path, **options)
    return path


# What the user does, the words of the message that say what is wrong, where it points (path or field), and a word of the remedy.
CAUSES: dict[str, tuple[Callable[[Path], object], str, str, str]] = {
    "no such file": (lambda t: toc.load(t / "nothing"), "no such file", "nothing", "path"),
    "not a checkpoint": (lambda t: toc.load(written(t / "x.bin", "hello")), "not a checkpoint", "x.bin", "format="),
    "an empty file": (lambda t: toc.load(written(t / "empty", b"")), "not a checkpoint", "empty", "format="),
    "a truncated file": (lambda t: toc.load(cut(t)), "", "cut", "damaged"),
    "a lost sidecar": (half, "", "a", "."),
    "an unknown format": (lambda t: toc.load(ADAMW.checkpoint, format="h5"), "unknown format 'h5'", "", "ort, safetensors"),
    "an unknown option": (lambda t: toc.save(small(), t / "a", shard=1), "no option shard", "", "It has:"),
    "a name without format": (lambda t: toc.convert(ADAMW.checkpoint, t / "a.xyz"), "can't tell a format", "a.xyz", "--to"),
    "an existing file": (lambda t: toc.save(small(), saved(small(), t / "a"), overwrite=False), "exists already", "a", "--overwrite"),
    "a read-only format": (lambda t: toc.save(small(), t / "a", format="ortpt"), "can be read, not written", "a", "another format"),
    "several groups": (lambda t: toc.save(groups(2), t / "a"), "", "a", "groups="),
    "a property of a wrong type": (
        lambda t: toc.save(toc.CheckpointState(properties={"p": [1]}), t / "a"), "must be int, float or str", "p", "json.dumps"),
    "nothing to average": (lambda t: toc.average([]), "nothing to average", "", "at least one"),
    "too few weights": (lambda t: toc.average([small(), small()], weights=[1]), "1 weights for 2", "", "one weight for each"),
    "a weight of NaN": (lambda t: toc.average([small()], weights=[math.nan]), "must be finite", "", "samples"),
    "different models": (
        lambda t: toc.average([small(), toc.CheckpointState(trainable={"w": torch.ones(5)})]), "(5,)", "w", "torch-ort-ckpt diff"),
    "a negative tolerance": (lambda t: toc.diff(small(), small(), atol=-1), "must not be negative", "", "0"),
    "no ranks": (lambda t: toc.merge([]), "no ranks", "", "at least one"),
    "a plan without parts": (lambda t: toc.PartitionPlan(data_parallel_size=0), "must be positive", "plan", "1"),
    "a plan with an unknown weight": (
        lambda t: toc.split(small(), toc.PartitionPlan(horizontal_parallel_size=2, rows=("nope",))), "does not have", "nope", "inspect"),
    "a weight that can't be cut": (
        lambda t: toc.split(small(), toc.PartitionPlan(horizontal_parallel_size=2, columns=("w",))), "can't be cut in 2", "w", "divides"),
    "a wrong optimizer": (
        lambda t: toc.to_optimizer_state_dict(groups(1), torch.optim.AdamW(nn.Linear(1, 1).parameters()), module=NET), "not the module's",
        "optimizer", "module="),
    "not a state dict": (lambda t: toc.from_torch({"w": "text"}), "not a state dict", "w", "state_dict()"),
    "like another model": (lambda t: toc.from_torch({"w": torch.ones(7)}, like=small()), "(7,)", "w", "like="),
    "a name given twice": (lambda t: toc.NameMap.from_dict({"a": "w", "b": "w"}), "mapped from both", "w", "once"),
    "transposing a vector": (
        lambda t: toc.to_state_dict(small(b=torch.ones(3)), toc.NameMap.from_dict({"b": {"name": "c", "transpose": True}})),
        "only matrices", "c", "transpose"),
    "a name map that is no JSON": (
        lambda t: toc.convert(ADAMW.checkpoint, t / "a", names=written(t / "map.json", "{")), "not a readable JSON", "map.json",
        "fc.weight"),
    "a name map of a wrong form": (
        lambda t: toc.convert(ADAMW.checkpoint, t / "a", names=written(t / "map.json", "[1]")), "JSON object", "map.json", "fc.weight"),
    "a folder without artifacts": (lambda t: toc.OrtModule(t), "", "", "."),
    "an unknown engine": (lambda t: toc.OrtModule(ADAMW.folder, engine="tpu"), "no engine called 'tpu'", "", '"auto"'),
    "an unknown dimension": (
        lambda t: toc.OrtModule(ADAMW.folder, engine="torch", dimensions={"seq": 1}), "no symbolic dimension 'seq'", "adamw", "batch"),
    "a dimension of zero": (
        lambda t: toc.OrtModule(ADAMW.folder, engine="torch", dimensions={"batch": 0}), "positive", "adamw", "dimensions="),
    "an input that is no tensor": (
        lambda t: toc.OrtModule(ADAMW.folder, engine="torch")("text", torch.zeros(2)), "expected a tensor", "x", "as_tensor"),
    "an unknown parameter": (lambda t: small().set_parameter("nope", torch.ones(1)), "no parameter named 'nope'", "nope", ".trainable"),
    "an output that the graph lacks": (
        lambda t: toc.to_torch_module(ADAMW.folder, outputs=["nope"]), "nope", "outputs", "onnx.load"),
    "a scheduler that is not there": (
        lambda t: toc.TrainingSession(ADAMW.folder, engine="torch").scheduler_step(), "no scheduler", "", "register_scheduler"),
    "a buffer of a wrong size": (
        lambda t: toc.TrainingSession(ADAMW.folder, engine="torch").copy_buffer_to_parameters(torch.ones(3)), "3 elements", "",
        "get_contiguous_parameters"),
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_it_says_what_where_and_what_to_do(cause: str, tmp_path: Path) -> None:
    action, what, where, remedy = CAUSES[cause]
    with pytest.raises(toc.CheckpointError) as caught:
        action(tmp_path)
    error, text = caught.value, str(caught.value)
    assert what in error.message
    assert where in f"{error.path or ''} {error.field or ''}"
    assert where == "" or error.path or error.field
    assert error.remedy, f"{text!r} does not say what to do"
    assert remedy in error.remedy
    assert text.endswith(error.remedy)
    assert "Traceback" not in text
    assert "\n" not in text


def test_kinds_can_be_caught_as_python_knows_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        toc.load(tmp_path / "nothing")
    assert issubclass(MissingFileError, toc.CheckpointError)
    assert CorruptFileError("x").remedy
    assert UnsupportedError("x").remedy is None


def test_warnings_come_once_and_can_be_silenced(tmp_path: Path) -> None:
    state = toc.CheckpointState(trainable={"w": torch.ones(2)}, mixed_precision={"w": torch.zeros(2, dtype=torch.float16)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        toc.save(state, tmp_path / "a", include_mixed_precision=True)
    assert [item.category for item in caught] == [toc.CheckpointWarning]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore", toc.CheckpointWarning)
        toc.save(state, tmp_path / "a", include_mixed_precision=True)
    assert caught == []


def test_the_library_never_prints() -> None:
    """`cli` does, and nothing else: the library logs."""
    printing = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        if "cli" not in path.relative_to(PACKAGE).parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []


def test_every_error_says_where_or_what_to_do() -> None:
    kinds = {"CheckpointError", "UnsupportedError"}
    mute = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
        if node.exc.func.id in kinds and not {keyword.arg for keyword in node.exc.keywords} & {"path", "field", "remedy"}
    ]
    assert mute == []
