"""What `onnxruntime.training.api` does with artifacts whose gradients PyTorch made: accumulation, one buffer, a model for inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from torch.nn import functional as F

from tests.models import batch, exported, module
from tests.official import Official

pytestmark = pytest.mark.ort


@pytest.fixture
def official(tmp_path: Path) -> Official:
    return Official(exported("cnn"), tmp_path)


def gradients_of(official: Official) -> dict[str, Any]:
    return {name: value.copy() for name, value in official.gradients()}


def test_inputs_and_outputs_are_in_ort_s_order() -> None:
    artifacts = exported("cnn")
    assert artifacts.training is not None
    inputs = [value.name for value in artifacts.training.graph.input]
    outputs = [value.name for value in artifacts.training.graph.output]
    trained = artifacts.trainable
    count = len(trained)
    assert inputs[:2] == ["x", "labels"]
    assert inputs[-count - 1 : -1] == [f"{name}_grad.accumulation.buffer" for name in trained]
    assert inputs[-1] == "lazy_reset_grad"
    assert outputs == ["loss", *(f"{name}_grad.accumulation.out" for name in trained)]
    accumulators = [node for node in artifacts.training.graph.node if node.op_type == "InPlaceAccumulatorV2"]
    assert [node.output[0] for node in accumulators if node.output[0] in outputs] == outputs[1:]


def test_gradients_add_up_until_they_are_reset(official: Official) -> None:
    first, second = batch("cnn", 4, seed=1), batch("cnn", 6, seed=2)
    official.loss(*first)
    one = gradients_of(official)
    official.loss(*second)
    both = gradients_of(official)
    official.module.lazy_reset_grad()
    official.loss(*second)
    other = gradients_of(official)
    for name in one:
        np.testing.assert_allclose(both[name], one[name] + other[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_contiguous_buffer_holds_every_parameter_and_can_be_put_back(official: Official) -> None:
    import onnxruntime

    net = module("cnn")
    before = official.module.get_contiguous_parameters(trainable_only=True).numpy().copy()
    assert before.size == sum(value.numel() for value in net.parameters())
    assert sorted(before.tolist()) == sorted(torch.cat([value.detach().flatten() for value in net.parameters()]).tolist())
    official.step(*batch("cnn"))
    assert np.abs(official.module.get_contiguous_parameters(trainable_only=True).numpy() - before).max() > 1e-5
    # ORT's Python API hands its own wrapper to the extension, which takes only what is inside it
    official.module.copy_buffer_to_parameters(onnxruntime.OrtValue.ortvalue_from_numpy(before)._ortvalue, trainable_only=True)
    np.testing.assert_array_equal(official.module.get_contiguous_parameters(trainable_only=True).numpy(), before)


def test_the_trained_model_is_exported_for_inference(official: Official, tmp_path: Path) -> None:
    import onnxruntime

    x, labels = batch("cnn")
    official.step(x, labels)
    path = tmp_path / "inference.onnx"
    official.module.export_model_for_inferencing(str(path), ["output"])
    assert [value.name for value in onnx.load(path).graph.input] == ["x"]
    net = module("cnn").eval()
    net.load_state_dict({name: torch.tensor(value) for name, value in official.parameters()}, strict=False)
    (found,) = onnxruntime.InferenceSession(str(path)).run(["output"], {"x": x.numpy()})
    np.testing.assert_allclose(found, net(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    assert float(official.evaluate(x, labels)) == pytest.approx(F.cross_entropy(net(x), labels).item(), rel=1e-5)
