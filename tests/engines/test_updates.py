"""The torch updates against onnxruntime executing the same optimizer node, for twenty steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from torch_ort_ckpt.engines.updates import TorchUpdater, Update, clip_gradients
from torch_ort_ckpt.graphs.artifacts import OptimizerSpec

DATA = Path(__file__).parent.parent / "data"
SHAPES = [(4, 3), (5,), (), (2, 1, 6)]


class Run:
    """Parameters, moments and per-step gradients, once for ORT (numpy, updated in place) and once for torch."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(7)
        self.params = [np.array(self.random.standard_normal(shape), np.float32) for shape in SHAPES]
        self.moments = [[np.zeros_like(p) for p in self.params] for _ in range(2)]
        self.torch_params = [torch.tensor(p) for p in self.params]
        self.torch_moments = [[torch.zeros_like(p) for p in self.torch_params] for _ in range(2)]

    def gradients(self, scale: float) -> tuple[list[np.ndarray], list[torch.Tensor]]:
        values = [np.array(self.random.standard_normal(shape) * scale, np.float32) for shape in SHAPES]
        return values, [torch.tensor(value) for value in values]

    def update(self, spec: OptimizerSpec, gradients: list[torch.Tensor], step: int, lr: float) -> None:
        TorchUpdater().apply(Update(self.torch_params, gradients, *self.torch_moments, step, lr, spec))

    def assert_close(self, tolerance: float = 2e-6) -> None:
        for ours, theirs in zip(
            [*self.torch_params, *self.torch_moments[0], *self.torch_moments[1]],
            [*self.params, *self.moments[0], *self.moments[1]],
            strict=True,
        ):
            torch.testing.assert_close(ours, torch.tensor(theirs), rtol=tolerance, atol=tolerance)


def session(model: onnx.ModelProto) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(model.SerializeToString())


def optimizer_model(operator: str, clip: float | None = None, **attributes: Any) -> onnx.ModelProto:
    sequences = ["params", "gradients", "first_order_moments", "second_order_moments"]
    gradients = "gradients" if clip is None else "clipped"
    nodes = (
        [] if clip is None else [helper.make_node("InplaceClipGradNorm", ["gradients"], [gradients], domain="com.microsoft", max_norm=clip)]
    )
    inputs = ["learning_rate", "step", "params", gradients, *sequences[2:]]
    nodes.append(helper.make_node(operator, inputs, ["updated"], domain="com.microsoft", **attributes))
    graph = helper.make_graph(
        nodes,
        "optimizer",
        [
            helper.make_tensor_value_info("learning_rate", TensorProto.FLOAT, [1]),
            helper.make_tensor_value_info("step", TensorProto.INT64, [1]),
            *(helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None) for name in sequences),
        ],
        [helper.make_tensor_value_info("updated", TensorProto.BOOL, [1])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15), helper.make_opsetid("com.microsoft", 1)], ir_version=8)


def adamw_feed(run: Run, gradients: list[np.ndarray], lr: float, step: int) -> dict[str, Any]:
    return {
        "learning_rate": np.array([lr], np.float32),
        "step": np.array([step]),
        "params": run.params,
        "gradients": gradients,
        "first_order_moments": run.moments[0],
        "second_order_moments": run.moments[1],
    }


@pytest.mark.ort
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("adam_mode", "correct_bias"), [(0, True), (1, True), (1, False)])
def test_adamw_is_ort_s(adam_mode: int, correct_bias: bool, weight_decay: float, clip: float | None) -> None:
    # A large epsilon, so that its place in the formula shows.
    spec = OptimizerSpec("AdamW", (0.8, 0.97), 1e-2, weight_decay, adam_mode, correct_bias, clip)
    ort = session(
        optimizer_model(
            "AdamWOptimizer",
            clip,
            alpha=0.8,
            beta=0.97,
            epsilon=1e-2,
            weight_decay=weight_decay,
            adam_mode=adam_mode,
            correct_bias=int(correct_bias),
        )
    )
    run = Run()
    for step in range(1, 21):
        lr = 0.01 * step
        gradients, torch_gradients = run.gradients(1.0)
        ort.run(None, adamw_feed(run, gradients, lr, step))
        run.update(spec, torch_gradients, step, lr)
    run.assert_close()


@pytest.mark.ort
def test_sgd_is_ort_s() -> None:
    ort, run = session(onnx.load(DATA / "fbv2_ort1_18_0_sgd_full" / "optimizer_model.onnx")), Run()
    names = [value.name for value in ort.get_inputs()]
    for step in range(1, 11):
        gradients, torch_gradients = run.gradients(1.0)
        feed = adamw_feed(run, gradients, 0.1, step)
        ort.run(None, {name: feed[name] for name in names})
        run.update(OptimizerSpec("SGD"), torch_gradients, step, 0.1)
    run.assert_close()


def test_adam_mode_0_is_torch_s_adamw() -> None:
    run = Run()
    native = [torch.nn.Parameter(p.clone()) for p in run.torch_params]
    optimizer = torch.optim.AdamW(native, lr=0.01, eps=1e-3, weight_decay=0.1, foreach=False, fused=False)
    spec = OptimizerSpec("AdamW", eps=1e-3, weight_decay=0.1)
    for step in range(1, 11):
        _, gradients = run.gradients(1.0)
        for param, gradient in zip(native, gradients, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
        run.update(spec, gradients, step, 0.01)
    for ours, theirs in zip(run.torch_params, native, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=2e-6, atol=2e-6)


def test_clipping_leaves_small_gradients_alone() -> None:
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    clip_gradients(gradients, 10.0)
    assert gradients[0].tolist() == [3.0, 0.0]
    clip_gradients(gradients, 1.0)
    torch.testing.assert_close(torch.cat([g.flatten() for g in gradients]), torch.tensor([0.6, 0.0, 0.8]))
