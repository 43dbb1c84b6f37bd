"""The optimizer's update in standard operators, against `torch.optim` and the fused update."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from torch_ort_ckpt.checkpoint.state import OptimizerSpec
from torch_ort_ckpt.engines.updates import TorchUpdater, Update
from torch_ort_ckpt.errors import UnsupportedError
from torch_ort_ckpt.graphs.standard.fragment import Fragment
from torch_ort_ckpt.graphs.standard.update import JOINED, NEW, add_update, moments_of

SHAPES = {"weight": (3, 4), "bias": (3,), "scale": (), "table": (5, 2, 2)}
STEPS = 6

CASES = {
    "AdamW": (OptimizerSpec("AdamW", weight_decay=0.01), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01)),
    "Adam": (OptimizerSpec("Adam"), lambda p: torch.optim.Adam(p, lr=0.1)),
    "Adam with decay": (OptimizerSpec("Adam", weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1)),
    "SGD": (OptimizerSpec("SGD"), lambda p: torch.optim.SGD(p, lr=0.1)),
    "SGD with decay": (OptimizerSpec("SGD", weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)),
    "SGD with momentum": (OptimizerSpec("SGD", momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "SGD with nesterov": (
        OptimizerSpec("SGD", momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
}


def states_of(spec: OptimizerSpec) -> dict[str, tuple[int, ...]]:
    return {name: shape for parameter, shape in SHAPES.items() for name in _names(spec, parameter)}


def _names(spec: OptimizerSpec, parameter: str) -> list[str]:
    return [parameter, *(f"{parameter}.{kind}" for kind in moments_of(spec))]


def evaluator(spec: OptimizerSpec, joined: int = JOINED) -> ReferenceEvaluator:
    """The update as a model of its own, with the gradients as inputs, run by the `onnx` package."""
    fragment = Fragment(states_of(spec))
    add_update(fragment, spec, SHAPES, {name: f"{name}.gradient" for name in SHAPES}, joined=joined)
    inputs = [helper.make_tensor_value_info("lr", TensorProto.FLOAT, []), helper.make_tensor_value_info("step", TensorProto.INT64, [])]
    inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in states_of(spec).items()]
    inputs += [helper.make_tensor_value_info(f"{name}.gradient", TensorProto.FLOAT, shape) for name, shape in SHAPES.items()]
    outputs = [helper.make_tensor_value_info(name + NEW, TensorProto.FLOAT, shape) for name, shape in states_of(spec).items()]
    graph = helper.make_graph(fragment.nodes, "update", inputs, outputs, fragment.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return ReferenceEvaluator(model)


def gradients_at(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {name: np.asarray(random.normal(size=shape), np.float32) for name, shape in SHAPES.items()}


def run(spec: OptimizerSpec, rates: list[float], joined: int = JOINED) -> dict[str, np.ndarray]:
    session = evaluator(spec, joined)
    state = {name: np.zeros(shape, np.float32) for name, shape in states_of(spec).items()} | _start()
    for step, rate in enumerate(rates, start=1):
        feed = {f"{name}.gradient": value for name, value in gradients_at(step).items()}
        made = session.run(None, {**state, **feed, "lr": np.float32(rate), "step": np.int64(step)})
        state = dict(zip(states_of(spec), made, strict=True))
    return state


def _start() -> dict[str, np.ndarray]:
    return {name: np.linspace(-1, 1, max(1, int(np.prod(shape))), dtype=np.float32).reshape(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("joined", [0, 12, JOINED], ids=["one by one", "some joined", "all joined"])
@pytest.mark.parametrize("case", CASES)
def test_equals_torch_optim(case, joined):
    spec, make = CASES[case]
    parameters = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in _start().items()}
    optimizer = make(list(parameters.values()))
    rates = [0.1, 0.05, 0.1, 0.0, 0.1, 0.02]
    for step, rate in enumerate(rates, start=1):
        optimizer.param_groups[0]["lr"] = rate
        for name, value in gradients_at(step).items():
            parameters[name].grad = torch.tensor(value)
        optimizer.step()
    state = run(spec, rates, joined)
    for name, parameter in parameters.items():
        np.testing.assert_allclose(state[name], parameter.detach().numpy(), rtol=0, atol=5e-7)


@pytest.mark.parametrize("correct_bias", [True, False])
@pytest.mark.parametrize("mode", [0, 1])
def test_equals_the_fused_update_of_orts_variants(mode, correct_bias):
    spec = OptimizerSpec("AdamW", eps=1e-6, weight_decay=0.1, adam_mode=mode, correct_bias=correct_bias, max_norm=0.5)
    parameters = {name: torch.tensor(value) for name, value in _start().items()}
    moments = [[torch.zeros_like(value) for value in parameters.values()] for _ in range(2)]
    updater = TorchUpdater()
    for step in range(1, STEPS + 1):
        gradients = [torch.tensor(value) for value in gradients_at(step).values()]
        updater.apply(Update(list(parameters.values()), gradients, *moments, step, 0.1, spec))
    state = run(spec, [0.1] * STEPS)
    for index, (name, parameter) in enumerate(parameters.items()):
        np.testing.assert_allclose(state[name], parameter.numpy(), rtol=0, atol=5e-7)
        for number, own in enumerate(moments):
            np.testing.assert_allclose(state[f"{name}.momentum{number}"], own[index].numpy(), rtol=0, atol=5e-7)


def test_clipping_changes_the_result():
    plain = OptimizerSpec("SGD")
    clipped = run(dataclasses.replace(plain, max_norm=0.01), [1.0])
    moved = sum(float(((clipped[name] - value) ** 2).sum()) for name, value in _start().items())
    assert moved == pytest.approx(0.01**2, rel=1e-4)
    assert not np.allclose(run(plain, [1.0])["weight"], clipped["weight"])


def test_bias_correction_stays_exact_after_many_steps():
    spec = OptimizerSpec("AdamW")
    session = evaluator(spec)
    state = {name: np.zeros(shape, np.float32) for name, shape in states_of(spec).items()} | _start()
    feed = {f"{name}.gradient": value for name, value in gradients_at(1).items()}
    step = 100_000
    made = session.run(["weight.new"], {**state, **feed, "lr": np.float32(0.1), "step": np.int64(step)})[0]
    first, second = 0.1 / (1 - 0.9**step), 0.001 / (1 - 0.999**step)
    gradient = feed["weight.gradient"].astype(np.float64)
    expected = state["weight"] - 0.1 * first * gradient / (np.sqrt(second * gradient**2) + 1e-8)
    np.testing.assert_allclose(made, expected, rtol=1e-6)


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(UnsupportedError, match="Lamb"):
        evaluator(OptimizerSpec("Lamb"))
