"""Graphs that compute with half-precision aliases: refreshed from the masters before each run, gradients reach the masters in fp32."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.models import batch, exported, module
from torch_ort_ckpt.graphs.description import ACCUMULATION_BUFFER

pytestmark = pytest.mark.ort_any

WEIGHTS = ("fc1.weight", "fc2.weight")


def mixed(folder: Path, suffix: str, *, half_gradients: bool = False) -> toc.Artifacts:
    """The MLP's artifacts with its matrices read through `<w>_fp16` or `<w>_bf16` inputs (and gradients in that type, if asked)."""
    kind = TensorProto.FLOAT16 if suffix == "_fp16" else TensorProto.BFLOAT16
    source = exported("mlp").folder
    for name in ("optimizer_model.onnx", "checkpoint"):
        shutil.copy(source / name, folder / name)
    for name in ("training_model.onnx", "eval_model.onnx"):
        model = onnx.load(source / name)
        for value in model.graph.input:
            if value.name in WEIGHTS:
                model.graph.node.insert(0, helper.make_node("Cast", [value.name + suffix], [value.name], to=TensorProto.FLOAT))
                value.name += suffix
                value.type.tensor_type.elem_type = kind
            elif half_gradients and value.name.endswith(ACCUMULATION_BUFFER) and value.name.startswith(WEIGHTS):
                value.name = value.name.replace("_grad.", f"{suffix}_grad.")
                value.type.tensor_type.elem_type = kind
        if half_gradients:
            for node in list(model.graph.node):
                if node.op_type == "InPlaceAccumulatorV2" and node.input[0].startswith(WEIGHTS):
                    full = node.input[1]
                    node.input[0], node.input[1] = (
                        node.input[0].replace("_grad.", f"{suffix}_grad."),
                        full.replace("_grad", f"{suffix}_grad"),
                    )
                    node.output[0] = node.output[0].replace("_grad.", f"{suffix}_grad.")
                    model.graph.node.append(helper.make_node("Cast", [full], [node.input[1]], to=kind))
            for value in model.graph.output:
                if value.name.startswith(WEIGHTS):
                    value.name = value.name.replace("_grad.", f"{suffix}_grad.")
        onnx.save(model, folder / name)
    state = toc.load(folder / "checkpoint", mmap=False)
    dtype = torch.float16 if suffix == "_fp16" else torch.bfloat16
    state.mixed_precision = {name: state.trainable[name].to(dtype) for name in WEIGHTS}
    toc.save(state, folder / "checkpoint", include_mixed_precision=True)
    return toc.Artifacts.load(folder)


def rounded_leaves(native: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters as the graph sees them, to be differentiated by."""
    return {
        name: (value.detach().to(dtype).float() if name in WEIGHTS else value.detach().clone()).requires_grad_()
        for name, value in native.named_parameters()
    }


@pytest.mark.parametrize("half_gradients", [False, True])
@pytest.mark.parametrize(("suffix", "dtype"), [("_fp16", torch.float16), ("_bf16", torch.bfloat16)])
def test_training_with_half_precision_aliases(tmp_path: Path, suffix: str, dtype: torch.dtype, half_gradients: bool) -> None:
    artifacts = mixed(tmp_path, suffix, half_gradients=half_gradients)
    assert artifacts.aliases == {name + suffix: name for name in WEIGHTS}
    assert set(artifacts.trainable) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    assert [spec.name for spec in artifacts.inputs] == ["x", "labels"]
    model = toc.OrtModule(artifacts, threads=1)
    assert model.fc1.weight.dtype is torch.float32
    optimizer = toc.OrtOptimizer(model, lr=0.01)
    native = module("mlp")
    for seed in range(4):
        x, y = batch("mlp", seed=seed)
        native.load_state_dict(model.state_dict())
        rounded = rounded_leaves(native, dtype)
        expected = F.cross_entropy(torch.func.functional_call(native, rounded, (x,)), y)
        expected.backward()
        loss = model(x, y) if seed % 2 else model.train_step(x, y)
        if seed % 2:
            loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6, check_device=False)
        for name, parameter in rounded.items():
            gradient = model.get_parameter(name).grad
            assert gradient.dtype is torch.float32
            coarse = half_gradients and name in WEIGHTS
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-2 if coarse else 1e-4, atol=1e-3 if coarse else 1e-6)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.fc1.weight.data.zero_()  # autograd does not see this; the alias must be refreshed all the same
    native.load_state_dict(model.state_dict())
    rounded = rounded_leaves(native, dtype)
    x, y = batch("mlp", seed=9)
    torch.testing.assert_close(
        model.eval()(x, y), F.cross_entropy(torch.func.functional_call(native, rounded, (x,)), y).detach(), rtol=1e-5, atol=1e-6
    )


def test_a_loss_scale_does_not_overflow_half_gradients(tmp_path: Path) -> None:
    model = toc.OrtModule(mixed(tmp_path, "_fp16", half_gradients=True), threads=1)
    model(*batch("mlp")).backward()
    plain = model.fc1.weight.grad.clone()
    model.zero_grad()
    (model(*batch("mlp")) * 2.0**20).backward()
    assert torch.equal(model.fc1.weight.grad, plain * 2.0**20)


def test_checkpoints_keep_masters_and_aliases_together(tmp_path: Path) -> None:
    artifacts = mixed(tmp_path, "_fp16")
    model = toc.OrtModule(artifacts, threads=1)
    optimizer = toc.OrtOptimizer(model, lr=0.1)
    model.train_step(*batch("mlp"))
    optimizer.step()
    state = model.checkpoint(optimizer)
    assert state.mixed_precision.keys() == set(WEIGHTS)
    assert state.stale_aliases() == []
    toc.save(state, tmp_path / "trained", include_mixed_precision=True)
    resumed = toc.OrtModule(toc.Artifacts.load(tmp_path, checkpoint=tmp_path / "trained"), threads=1)
    assert resumed(*batch("mlp", seed=1)).item() == model(*batch("mlp", seed=1)).item()
    model.export_inference(tmp_path / "inference.onnx", ["output"])
    stored = {tensor.name: tensor.data_type for tensor in onnx.load(tmp_path / "inference.onnx").graph.initializer}
    assert stored["fc1.weight_fp16"] == TensorProto.FLOAT16
