"""What may be fed to a model, and what is refused before it reaches an engine."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import torch_ort_ckpt as toc
from tests.truth import DATA

ENGINES = [pytest.param("ort", marks=pytest.mark.ort), "torch"]
HOW = ["forward", "eval", "train_step", "session.train_step", "session.eval_step"]


@functools.cache
def calls(source: Any, engine: str, batch: int | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {"dimensions": {"batch": batch}} if batch else {}
    model = toc.OrtModule(source, engine=engine, threads=1, **options)
    session = toc.TrainingSession(source, engine=engine, threads=1, **options)
    return {
        "forward": lambda *inputs: model.train()(*inputs),
        "eval": lambda *inputs: model.eval()(*inputs),
        "train_step": lambda *inputs: model.train().train_step(*inputs),
        "session.train_step": session.train_step,
        "session.eval_step": session.eval_step,
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_an_empty_batch_is_refused(engine: str) -> None:
    """In another process: ONNX Runtime would take this one down (division by zero)."""
    program = f"""
import torch, torch_ort_ckpt as toc
from tests.runtime.test_inputs import calls, DATA
for how, call in calls(DATA / "fbv2_ort1_19_2_initial", {engine!r}).items():
    try:
        call(torch.zeros(0, 12), torch.zeros(0, dtype=torch.int64))
    except toc.CheckpointError as error:
        assert str(error).startswith("x: is empty"), error
        call(torch.zeros(2, 12), torch.zeros(2, dtype=torch.int64))
        print(how)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.stdout.split() == HOW, done.stderr


WRONG: dict[str, tuple[Any, Any, str]] = {
    "rank": (torch.zeros(4), torch.zeros(4, dtype=torch.int64), r"x: has 1 dimension"),
    "a rank too many": (torch.zeros(4, 12), torch.zeros(4, 1, dtype=torch.int64), r"labels: has 2 dimensions"),
    "width": (torch.zeros(4, 13), torch.zeros(4, dtype=torch.int64), r"x: has size 13 in dimension 1.*takes 12"),
    "two sizes of batch": (torch.zeros(4, 12), torch.zeros(3, dtype=torch.int64), r"labels: has size 3 in dimension 0.*batch.*is 4"),
    "float labels": (torch.zeros(4, 12), torch.zeros(4), r"labels: is float32, the graph takes int64"),
    "integer data": (torch.zeros(4, 12, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), r"x: is int64, the graph takes float32"),
    "complex data": (torch.zeros(4, 12, dtype=torch.complex64), torch.zeros(4, dtype=torch.int64), r"x: is complex64"),
    "a string": ("hello", torch.zeros(4, dtype=torch.int64), r"x: expected a tensor, not str"),
    "strings": (["hello", "you"], torch.zeros(4, dtype=torch.int64), r"x: expected a tensor"),
    "bytes": (b"hello", torch.zeros(4, dtype=torch.int64), r"x: expected a tensor, not bytes"),
    "an array of strings": (np.array(["hello", "you"]), torch.zeros(4, dtype=torch.int64), r"x: expected a tensor"),
    "an array of objects": (np.array(["hello", None], object), torch.zeros(4, dtype=torch.int64), r"x: expected a tensor"),
    "a ragged list": ([[1.0], [2.0, 3.0]], torch.zeros(4, dtype=torch.int64), r"x: expected a tensor"),
    "nothing": (None, torch.zeros(4, dtype=torch.int64), r"x: expected a tensor, not NoneType"),
    "a sparse tensor": (torch.zeros(4, 12).to_sparse(), torch.zeros(4, dtype=torch.int64), r"x: is a sparse_coo tensor"),
    "a tensor without memory": (torch.zeros(4, 12, device="meta"), torch.zeros(4, dtype=torch.int64), r"x: is on meta"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", WRONG)
def test_what_the_graph_does_not_take_is_named(engine: str, kind: str) -> None:
    x, labels, message = WRONG[kind]
    for call in calls(DATA / "fbv2_ort1_19_2_initial", engine).values():
        with pytest.raises(toc.CheckpointError, match=message):
            call(x, labels)


@pytest.mark.parametrize("engine", ENGINES)
def test_sizes_fixed_by_the_user_are_held_to(engine: str) -> None:
    for call in calls(DATA / "fbv2_ort1_19_2_initial", engine, 4).values():
        call(torch.zeros(4, 12), torch.zeros(4, dtype=torch.int64))
        with pytest.raises(toc.CheckpointError, match=r"x: has size 3 in dimension 0.*takes 4"):
            call(torch.zeros(3, 12), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("engine", ENGINES)
def test_sizes_may_be_fixed_later(engine: str) -> None:
    model = toc.OrtModule(DATA / "fbv2_ort1_19_2_initial", engine=engine, threads=1)
    model(torch.zeros(3, 12), torch.zeros(3, dtype=torch.int64))
    model.fix_dimensions({"batch": 4})
    assert model.options.dimensions == {"batch": 4}
    model.fix_dimensions({})
    assert model.options.dimensions == {"batch": 4}  # those that were fixed before stay so
    model(torch.zeros(4, 12), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(toc.CheckpointError, match=r"x: has size 3 in dimension 0.*takes 4"):
        model(torch.zeros(3, 12), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(toc.CheckpointError, match="no symbolic dimension 'width'"):
        model.fix_dimensions({"width": 4})


@pytest.mark.parametrize("engine", ENGINES)
def test_integers_that_do_not_fit_the_graph_are_refused(engine: str) -> None:
    model = toc.OrtModule(DATA / "pbseq_ort1_14_1_initial", engine=engine, threads=1)
    assert model.artifacts.inputs[1].dtype is torch.int32
    expected = model(torch.ones(2, 12), torch.tensor([1, 2], dtype=torch.int32))
    torch.testing.assert_close(model(torch.ones(2, 12), torch.tensor([1, 2])), expected)
    with pytest.raises(toc.CheckpointError, match=rf"labels: holds {2**32 + 1}, which int32 can't"):
        model(torch.ones(2, 12), torch.tensor([1, 2**32 + 1]))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_graph_that_takes_strings_is_refused(tmp_path: Path, engine: str) -> None:
    folder = tmp_path / "artifacts"
    shutil.copytree(DATA / "fbv2_ort1_19_2_initial", folder)
    graph = onnx.load(folder / "eval_model.onnx")
    graph.graph.input.append(helper.make_tensor_value_info("words", TensorProto.STRING, ["batch"]))
    graph.graph.node.append(helper.make_node("Identity", ["words"], ["same_words"]))
    graph.graph.output.append(helper.make_tensor_value_info("same_words", TensorProto.STRING, ["batch"]))
    onnx.save(graph, folder / "eval_model.onnx")
    with pytest.raises(toc.CheckpointError, match="words: has a type that PyTorch tensors don't support"):
        toc.OrtModule(folder, engine=engine, threads=1).eval()(torch.zeros(2, 12), torch.tensor([1, 2]), ["a", "b"])


@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
@pytest.mark.parametrize("device", ["cuda", "cuda:7", "nonsense", "cpu:nonsense", "mps", 3.5])
def test_a_device_that_is_not_there_is_refused(engine: str, device: Any) -> None:
    if str(device).split(":")[0] in ("cuda", "mps") and (torch.cuda.is_available() or torch.backends.mps.is_available()):
        pytest.skip("this machine has one")
    with pytest.raises(toc.CheckpointError, match=str(device)):
        toc.OrtModule(DATA / "fbv2_ort1_19_2_initial", device=device, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_size_seen_before_costs_no_second_look_and_others_are_still_looked_at(engine: str) -> None:
    model = toc.OrtModule(DATA / "fbv2_ort1_19_2_initial", engine=engine, threads=1)
    for size in (1, 2, 3, 1, 2, 3):
        model(torch.zeros(size, 12), torch.zeros(size, dtype=torch.int64))
    with pytest.raises(toc.CheckpointError, match="labels: has size 2"):
        model(torch.zeros(1, 12), torch.zeros(2, dtype=torch.int64))
