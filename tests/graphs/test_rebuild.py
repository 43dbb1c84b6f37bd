"""`rebuild_artifacts`: artifacts of other makers and inference models as artifacts of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.graphs.parity import assert_trains_like
from tests.models import batch, exported, module
from tests.official import Official
from torch_ort_ckpt.cli import main

DATA = Path(__file__).parents[1] / "data"
RECORDED = ("fbv1_ort1_16_3_adamw_full", "fbv1_ort1_17_3_sgd_full", "fbv2_ort1_18_0_external_adamw_full", "fbv2_ort1_19_2_adamw_full")


@pytest.mark.parametrize("fixture", RECORDED)
def test_a_recorded_run_goes_on_with_the_same_numbers(fixture: str, tmp_path: Path) -> None:
    """The moments, the step and the optimizer came along: the next losses are those that the old release recorded."""
    source = toc.Artifacts.load(DATA / fixture)
    made = toc.rebuild_artifacts(DATA / fixture, tmp_path)
    assert made.optimizer_spec == source.optimizer_spec
    assert made.trainable == source.trainable
    assert toc.diff(made.state, source.state).equal
    assert [str(spec) for spec in made.inputs] == [str(spec) for spec in source.inputs]
    truth = json.loads((DATA / fixture / "truth.json").read_text())["resume"]
    arrays = np.load(DATA / fixture / "truth.npz")
    for engine in ("torch", "ort") if _has_ort() else ("torch",):
        model = toc.OrtModule(made, engine=engine, threads=1)
        optimizer = toc.OrtOptimizer(model, lr=truth["learning_rate"])
        for place, expected in enumerate(truth["losses"]):
            loss = model(*(torch.from_numpy(arrays[f"x_resume_{kind}{place}"]) for kind in ("in", "target")))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert loss.item() == pytest.approx(expected, abs=1e-6)
        for name, key in truth["final_params"].items():
            np.testing.assert_allclose(model.get_parameter(name).detach().numpy(), arrays[key], rtol=0, atol=1e-6, err_msg=name)


def _has_ort() -> bool:
    from importlib.util import find_spec

    return find_spec("onnxruntime.training") is not None if find_spec("onnxruntime") is not None else False


@pytest.mark.ort
@pytest.mark.parametrize("name", ["cnn", "tied", "layernorm"])
def test_artifacts_made_by_onnx_runtime_train_like_the_module(name: str, tmp_path: Path) -> None:
    source = exported(name, builder="ort", extra_outputs=True)
    made = toc.rebuild_artifacts(source, tmp_path / "made")
    assert [spec.name for spec in made.outputs] == [spec.name for spec in source.outputs]
    assert all(not node.domain or node.op_type == "InPlaceAccumulatorV2" for node in made.training.graph.node)
    batches = [batch(name, size) for size in (4, 6)]
    assert_trains_like(made, module(name), batches, lambda m, x, y: F.cross_entropy(m(x), y), tmp_path)


@pytest.mark.ort
def test_the_eval_graph_still_exports_for_inference(tmp_path: Path) -> None:
    made = toc.rebuild_artifacts(exported("mlp", builder="ort"), tmp_path / "made")
    official = Official(made, tmp_path)
    official.module.export_model_for_inferencing(str(tmp_path / "inference.onnx"), ["output"])
    assert [value.name for value in onnx.load(tmp_path / "inference.onnx").graph.output] == ["output"]


class Net(nn.Module):
    """BatchNorm, a scalar, a table, and a buffer that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 5)
        nn.init.uniform_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.conv(x))).mean((2, 3)) * 0.5
        return self.fc(torch.where(self.mask, hidden, 0.0))


def inference_model(net: nn.Module, folder: Path, *inputs: torch.Tensor, **options: Any) -> Path:
    net.eval()
    path = folder / "model.onnx"
    torch.onnx.export(net, inputs, path, dynamo=True, optimize=False, verbose=False, external_data=False, **options)
    return path


@pytest.mark.ort
def test_an_inference_model_is_fine_tuned_as_pytorch_would_in_eval_mode(tmp_path: Path) -> None:
    """microsoft/onnxruntime #15867 and #13057: "fine-tune this ONNX model"."""
    torch.manual_seed(0)
    net = Net().eval()
    path = inference_model(
        net, tmp_path, torch.randn(2, 3, 6, 6), input_names=["image"], output_names=["scores"], dynamic_shapes=({0: torch.export.Dim("n")},)
    )
    made = toc.rebuild_artifacts(path, tmp_path / "made", "cross_entropy", "sgd")
    assert {str(spec) for spec in made.inputs} == {"image: float32[n, 3, 6, 6]", "labels: int64[n]"}
    assert set(made.trainable) == {name for name, _ in net.named_parameters()}
    assert {"norm.running_mean", "norm.running_var"} <= set(made.state.frozen)
    batches = [(torch.randn(size, 3, 6, 6), torch.randint(0, 5, (size,))) for size in (3, 5)]
    assert_trains_like(made, net, batches, lambda m, x, y: F.cross_entropy(m(x), y), tmp_path)
    model = toc.OrtModule(made, engine="torch")
    model.export_inference(tmp_path / "out.onnx", ["scores"])
    assert [value.name for value in onnx.load(tmp_path / "out.onnx").graph.output] == ["scores"]


def test_only_what_is_not_frozen_is_trained_with_a_loss_of_one_s_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = inference_model(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), tmp_path, torch.randn(2, 3), input_names=["in.1"])

    def distance(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (scores - wanted).abs().mean()

    made = toc.rebuild_artifacts(path, tmp_path / "made", distance, example_targets=torch.zeros(2, 2), frozen=["0.*"])
    assert made.trainable == ["2.weight", "2.bias"]
    assert [spec.name for spec in made.inputs] == ["in.1", "wanted"]
    model = toc.OrtModule(made, engine="torch")
    assert model(torch.randn(2, 3), torch.zeros(2, 2)).item() > 0


def test_another_loss_for_existing_artifacts_takes_the_named_value(tmp_path: Path) -> None:
    source = DATA / "fbv2_ort1_19_2_adamw_full"
    with pytest.raises(toc.CheckpointError, match="outputs"):
        toc.rebuild_artifacts(source, tmp_path / "no", "mse")
    logits = json.loads((source / "truth.json").read_text())
    name = next(node.input[0] for node in toc.Artifacts.load(source).eval.graph.node if node.op_type == "SoftmaxCrossEntropyLoss")
    made = toc.rebuild_artifacts(source, tmp_path / "made", "mse", outputs=[name])
    assert [spec.name for spec in made.inputs] == ["x", "target"]
    assert made.trainable
    assert made.state.step == logits["optimizer_groups"]["group0"]["step"]


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    path = inference_model(nn.Sequential(nn.ReLU()), tmp_path, torch.randn(2, 3))
    with pytest.raises(toc.CheckpointError, match="no weights"):
        toc.rebuild_artifacts(path, tmp_path / "made", "mse")


def test_settings_of_a_new_loss_without_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match="frozen is for another loss"):
        toc.rebuild_artifacts(DATA / "fbv2_ort1_19_2_adamw_full", tmp_path, frozen=["fc1.*"])


def test_the_command_rebuilds_and_replaces_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(DATA / "fbv2_ort1_19_2_adamw_full")
    assert main(["rebuild", source, str(tmp_path / "out"), "--for-ort", "1.17"]) == 0
    assert "5 parameters are trained" in capsys.readouterr().out
    assert onnx.load(tmp_path / "out" / "training_model.onnx").ir_version <= 9
    assert main(["rebuild", source, str(tmp_path / "out")]) != 0
    assert "--overwrite" in capsys.readouterr().err


def test_a_model_of_export_inference_is_fine_tuned(tmp_path: Path) -> None:
    """Its outputs were extra outputs of a training graph, through which no gradient flows."""
    toc.OrtModule(exported("mlp"), engine="torch").export_inference(tmp_path / "model.onnx", ["output"])
    made = toc.rebuild_artifacts(tmp_path / "model.onnx", tmp_path / "made", loss="cross_entropy")
    assert made.trainable == exported("mlp").trainable
    found, native = toc.OrtModule(made, engine="torch"), module("mlp")
    x, y = batch("mlp")
    found(x, y).backward()
    F.cross_entropy(native(x), y).backward()
    torch.testing.assert_close(found.fc1.weight.grad, native.fc1.weight.grad)
