"""A result handed out never changes, whatever runs next, and a batch may have another size than the one before it."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import helper

import torch_ort_ckpt as toc
from tests.models import batch, exported
from tests.truth import DATA

pytestmark = pytest.mark.ort_any  # the artifacts are made by ORT's own tools

ENGINES = ["ort", "torch"]
SIZES = (4, 1, 7, 4, 64)


def calls(model: Any) -> dict[str, Any]:
    """Every way to get a result out of a model."""
    session = toc.TrainingSession(model.artifacts, engine=model.engine.name, threads=1)

    def without_gradients(*inputs: torch.Tensor) -> Any:
        with torch.no_grad():
            return model.train()(*inputs)

    return {
        "forward": lambda *inputs: model.train()(*inputs),
        "no_grad": without_gradients,
        "eval": lambda *inputs: model.eval()(*inputs),
        "train_step": lambda *inputs: model.train().train_step(*inputs),
        "session.train_step": session.train_step,
        "session.eval_step": session.eval_step,
    }


def flat(result: Any) -> list[torch.Tensor]:
    return [value.detach() for value in (result if isinstance(result, tuple) else (result,))]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("extra_outputs", [False, True])
@pytest.mark.parametrize("how", ["forward", "no_grad", "eval", "train_step", "session.train_step", "session.eval_step"])
def test_results_stay_as_they_were_handed_out(engine: str, extra_outputs: bool, how: str) -> None:
    model = toc.OrtModule(exported("mlp", extra_outputs=extra_outputs), engine=engine, threads=1)
    call = calls(model)[how]
    handed_out, copies = [], []
    for number, size in enumerate(SIZES):
        results = flat(call(*batch("mlp", size, number)))
        assert [value.shape for value in results] == [(), (size, 5)][: len(results)]
        handed_out.append(results)
        copies.append([value.clone() for value in results])
    for results, copied in zip(handed_out, copies, strict=True):
        for found, expected in zip(results, copied, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len({float(results[0]) for results in handed_out}) == len(SIZES)


def test_results_of_several_threads_stay_apart() -> None:
    """Each thread has batches of its own: its results are those it gets alone, and stay so while the others run."""
    model = toc.OrtModule(exported("mlp", extra_outputs=True), engine="ort", threads=1)
    work = {seed: [batch("mlp", size, seed) for size in (3, 8, 1, 5)] for seed in range(4)}
    expected = {seed: [flat(model.train()(*inputs)) for inputs in batches] for seed, batches in work.items()}
    expected = {seed: [[value.clone() for value in values] for values in results] for seed, results in expected.items()}
    found: dict[int, list[Any]] = {}
    barrier = threading.Barrier(len(work))

    def run(seed: int) -> None:
        barrier.wait()
        ways = (model, model.train_step, model)
        found[seed] = [[flat(way(*inputs)) for inputs in work[seed]] for _ in range(15) for way in ways]

    threads = [threading.Thread(target=run, args=(seed,)) for seed in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, rounds in found.items():
        for results in rounds:
            for values, wanted in zip(results, expected[seed], strict=True):
                for value, want in zip(values, wanted, strict=True):
                    torch.testing.assert_close(value, want, rtol=0, atol=0)


def test_gradients_of_steps_in_several_threads_all_arrive() -> None:
    before = sys.getswitchinterval()
    model = toc.OrtModule(exported("mlp"), engine="ort", threads=1)
    batches = [batch("mlp", 4, seed) for seed in range(4)]
    for inputs in batches:
        model.train_step(*inputs)
    expected = {name: 200 * parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    barrier = threading.Barrier(len(batches))

    def run(inputs: Any) -> None:
        barrier.wait()
        for _ in range(200):
            model.train_step(*inputs)

    threads = [threading.Thread(target=run, args=(inputs,)) for inputs in batches]
    sys.setswitchinterval(1e-6)  # switch threads as often as possible
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    for name, parameter in model.named_parameters():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", ["itself", "Identity", "Reshape"])
def test_an_output_that_is_a_parameter_or_an_input_is_a_copy(tmp_path: Path, engine: str, how: str) -> None:
    """Otherwise the next update, or the user's next batch in the same memory, would change what was handed out."""
    folder = tmp_path / "artifacts"
    shutil.copytree(DATA / "fbv2_ort1_19_2_initial", folder)
    graph = onnx.load(folder / "eval_model.onnx")
    for name in ("fc1.bias", "x"):
        value = next(value for value in graph.graph.input if value.name == name)
        output = onnx.ValueInfoProto()
        output.CopyFrom(value)
        if how != "itself":
            output.name = f"{name}.again"
            inputs = [name]
            if how == "Reshape":
                shape = [len(value.type.tensor_type.shape.dim) * [0]]
                graph.graph.initializer.append(helper.make_tensor(f"{name}.shape", onnx.TensorProto.INT64, [len(shape[0])], shape[0]))
                inputs.append(f"{name}.shape")
            graph.graph.node.append(helper.make_node(how, inputs, [output.name]))
        graph.graph.output.append(output)
    onnx.save(graph, folder / "eval_model.onnx")
    model = toc.OrtModule(folder, engine=engine, threads=1).eval()
    x, labels = torch.randn(3, 12), torch.tensor([0, 1, 2])
    with torch.no_grad():
        _, bias, given = model(x, labels)
        before = bias.clone(), given.clone()
        model.fc1.bias.add_(1)
        x.mul_(2)
    torch.testing.assert_close((bias, given), before, rtol=0, atol=0)
